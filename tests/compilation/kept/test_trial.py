"""A trial forward that would find what an earlier one has found does not run, and after any change it runs."""

from __future__ import annotations

import abc
import collections
import enum
import functools
import os
import sys
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import compiled_llm
from compiled_llm import WrapConfig
from compiled_llm.compilation.artifacts.made_for import made_for
from compiled_llm.compilation.artifacts.writing import seal
from compiled_llm.compilation.kept import part
from compiled_llm.compilation.kept.fingerprint import fingerprint
from compiled_llm.compilation.kept.trial.values import UnsaidError, decoded, encoded
from compiled_llm.kinds.full import Full
from compiled_llm.model.probes import layers_of
from support.compilation.planted_runs import CHANGES
from support.compilation.reading import reading_model
from support.huggingface.families import FAMILIES, make
from support.parity import FEW_PAGES
from support.tiny_models import ONE_LAYER, tiny_qwen3

pytestmark = pytest.mark.slow


def trials() -> Any:
    """Count the trial forwards of the block that watch attention on tensors without values."""
    return mock.patch.object(layers_of, "probe_layers", wraps=layers_of.probe_layers)


def learnt(model: Any, **options: Any) -> tuple[int, Any]:
    """Return in how many trial forwards ``wrap`` has learnt what, and wait until it is kept."""
    with trials() as run:
        compiled_llm.wrap(model, **FEW_PAGES, **options)
    for thread in threading.enumerate():
        if thread.name == "compiled_llm kept programs":
            thread.join()
    facts = model.compiled.facts
    return run.call_count, (facts.layers, facts.fused_groups, facts.default_positions)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COMPILED_LLM_KEEP_PROGRAMS", "1")
    monkeypatch.setenv("COMPILED_LLM_CACHE", str(tmp_path))
    # Functions by which tests hasten tensors without values, and which would rightly count.
    known = {*fingerprint._SAYING_NOTHING, FakeTensorMode.__init__.__module__, "support.compilation.quick_tracing"}
    monkeypatch.setattr(fingerprint, "_SAYING_NOTHING", known)
    return tmp_path / "programs"


@pytest.mark.parametrize("family", ["Gemma3", *(pytest.param(name, marks=pytest.mark.whole) for name in FAMILIES)])
def test_the_second_wrap_learns_the_same_without_a_trial_forward(family: str, cache: Path) -> None:
    try:
        (ran, first), (ran_again, second) = (learnt(make(family, FAMILIES[family], 0).eval()) for _ in range(2))
    except (ValueError, RuntimeError) as error:  # some families need options
        pytest.skip(str(error))
    assert ran == 1
    assert first == second
    print(f"{family}: {ran_again} trial forwards")
    assert ran_again == 0 or family != "Gemma3"


ALWAYS = ("a function in the modeling file's globals", "a constant there", "a hook", "a function of torch", "autocast")


@pytest.mark.parametrize("whole_list", [False, pytest.param(True, marks=pytest.mark.whole)])
def test_after_any_change_it_runs(whole_list: bool, cache: Path) -> None:
    learnt(reading_model())
    assert learnt(reading_model())[0] == 0
    followed = {}
    for name in CHANGES if whole_list else ALWAYS:
        model = reading_model()
        with ExitStack() as stack, trials() as run:
            CHANGES[name](stack, model)
            with suppress(Exception):  # a change may leave no model that can be wrapped
                compiled_llm.wrap(model, **FEW_PAGES)
        followed[name] = run.call_count
    assert [name for name, ran in followed.items() if not ran] == []


@pytest.fixture
def artifacts(cache: Path, tmp_path: Path) -> Path:
    """A folder with nothing but what the trial forward of the model has found."""
    folder, model = tmp_path / "artifacts", reading_model()
    folder.mkdir()
    with part.recording(folder):
        assert learnt(model)[0] == 1
    seal(folder, made_for(reading_model(), type(reading_model()), WrapConfig.from_options(FEW_PAGES)), rows=8)
    return folder


def test_with_artifacts_it_is_that_of_the_folder_and_after_any_change_it_runs(artifacts: Path) -> None:
    _, expected = learnt(reading_model())
    assert learnt(reading_model(), artifacts=artifacts) == (0, expected)
    for name in ALWAYS:
        model = reading_model()
        with ExitStack() as stack, trials() as run:
            CHANGES[name](stack, model)
            with suppress(Exception):  # as above
                compiled_llm.wrap(model, **FEW_PAGES, artifacts=artifacts)
        assert run.call_count == 1, name


def test_a_folder_that_is_refused_has_no_trial_forward(artifacts: Path) -> None:
    trial = artifacts / part.TRIAL
    trial.write_bytes(trial.read_bytes().replace(b"refused", b"refusee"))
    with trials() as run, pytest.raises(ValueError, match="is damaged"):
        compiled_llm.wrap(reading_model(), **FEW_PAGES, artifacts=artifacts)
    assert run.call_count == 1
    assert part._trial_in(artifacts / "nowhere") == []


def with_product(forward: Any) -> Any:
    """Return a model of one layer, one product of which is of a class with this ``forward``."""
    model: Any = tiny_qwen3(**ONE_LAYER)
    mlp = model.model.layers[0].mlp
    mlp.__class__ = type("Own", (type(mlp),), {"forward": forward, "__module__": __name__})
    return model


LOCAL = threading.local()
LOCAL.factor = 1.0


def by_environment(self: Any, x: torch.Tensor) -> Any:
    return self.down_proj(self.up_proj(x)) * float(os.environ.get("FACTOR", "1"))


def by_thread(self: Any, x: torch.Tensor) -> Any:
    return self.down_proj(self.up_proj(x)) * LOCAL.factor


def by_name(self: Any, x: torch.Tensor) -> Any:
    return self.down_proj(self.up_proj(x)) * getattr(self, "".join(("held", "_", "object"))).factor


class Held:
    factor = 1.0


@pytest.mark.parametrize("forward", [by_environment, by_thread, by_name])
def test_what_reads_anything_that_is_not_hashed_is_not_kept(forward: Any, cache: Path) -> None:
    for _ in range(2):
        model = with_product(forward)
        model.model.layers[0].mlp.held_object = Held()
        assert learnt(model)[0] == 1


FACTOR = 1.0


def by_global(self: Any, x: torch.Tensor) -> Any:
    return self.down_proj(self.up_proj(x)) * FACTOR


def around(forward: Any) -> Any:
    @functools.wraps(forward)
    def call(self: Any, x: torch.Tensor) -> Any:
        return forward(self, x)

    return call


def test_what_a_decorator_of_torch_holds_is_looked_into(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers decorates what computes angles of positions."""
    ran = [learnt(with_product(torch.no_grad()(around(by_global))))[0] for _ in range(2)]
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 2.0)
    assert [*ran, learnt(with_product(torch.no_grad()(around(by_global))))[0]] == [1, 0, 1]


class WithFactor(type):
    factor = property(lambda cls: FACTOR)


class OfFactor(metaclass=WithFactor):
    pass


class Entry(enum.Enum):
    ONE = 1.0

    def __bool__(self) -> bool:
        return FACTOR == 1


class Hooked(abc.ABC):  # noqa: B024 (its hook alone matters)
    @classmethod
    def __subclasshook__(cls, kind: type) -> bool:
        return FACTOR == 1


MADE = collections.defaultdict(lambda: FACTOR)
CACHED = functools.cache(lambda: FACTOR)

COMPUTED: dict[str, Any] = {
    "a property of a metaclass": lambda: OfFactor.factor,
    "the truth of an entry": lambda: 1.0 if Entry.ONE else 2.0,
    "an abstract class that was asked before": lambda: 1.0 if issubclass(int, Hooked) else 2.0,
    "a default entry": lambda: MADE.pop("factor", None) or MADE["factor"],
    "a result of a cache": lambda: CACHED(),
}


@pytest.mark.drawn(most=2)
@pytest.mark.parametrize("name", COMPUTED)
def test_what_is_computed_when_it_is_read_runs_again(name: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = COMPUTED[name]
    read()

    def forward(self: Any, x: torch.Tensor) -> Any:
        return self.down_proj(self.up_proj(x)) * read()

    learnt(with_product(forward))
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 2.0)
    assert learnt(with_product(forward))[0] == 1


def test_what_somebody_else_watches_is_not_kept(cache: Path) -> None:
    before = sys.gettrace()
    sys.settrace(lambda frame, event, argument: None)
    try:
        learnt(tiny_qwen3(**ONE_LAYER))
    finally:
        sys.settrace(before)
    assert not [*cache.glob("*/trial*")]


def test_invariance_and_functions_of_layers_learn_more_than_is_kept(cache: Path) -> None:
    for _ in range(2):
        with trials() as run:
            compiled_llm.wrap(tiny_qwen3(**ONE_LAYER), **FEW_PAGES, batch_invariant=True)
        assert run.call_count == 1


def test_layers_are_the_same_once_they_are_read() -> None:
    value = (("a", 1, 2.5, None, True), [torch.bfloat16], Full())
    assert decoded(encoded(value)) == value
    for unsaid in (object(), {1: 2}, torch.zeros(1), Held()):
        with pytest.raises(UnsaidError):
            encoded((unsaid,))


@pytest.mark.parametrize(
    "said",
    [
        {"class": ["os", "system"], "fields": {}},
        {"class": ["compiled_llm.env", "enable_logs"], "fields": {"names": ["graphs"]}},
        {"class": ["compiled_llm.env", "Env"], "fields": {"another": 1}},
        {"dtype": "nn"},
        {"set": [1]},
        {},
    ],
)
def test_anything_else_is_refused(said: Any) -> None:
    with pytest.raises(ValueError, match="no "):
        decoded(said)
