"""Whatever is changed of a model, of code or of settings: no kept program says what it said before the change."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch._inductor.codecache import CppPythonBindingsCodeCache

import compiled_llm
from compiled_llm.compat.torch.inductor import inductor_cache
from compiled_llm.compat.torch.kept.region_code import RegionCode
from compiled_llm.compilation.kept import part, record
from compiled_llm.compilation.kept.fingerprint import fingerprint
from compiled_llm.compilation.kept.fingerprint.fingerprint import Fingerprint
from compiled_llm.compilation.kept.fingerprint.surroundings import ProcessWatch
from compiled_llm.compilation.kept.take import Taker
from support.compilation import planted_runs
from support.compilation.kept_programs import taking
from support.compilation.planted_changes import OF_CODE, OF_MODEL, OF_PROCESS
from support.compilation.planted_runs import CHANGES, answer, before_wrap, graphs_run, keep
from support.compilation.reading import READ, Make, reading_model
from support.parity import FEW_PAGES

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("kept")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return filled(tmp_path_factory.mktemp("kept"))


def filled(folder: Path) -> Path:
    CppPythonBindingsCodeCache.cache_clear()  # other tests may have loaded the same kernels from caches of their own
    (folder / "inductor").symlink_to(inductor_cache())
    keep(folder)
    assert part.not_kept(folder) == {}
    return folder


@pytest.fixture(scope="module")
def for_any_threads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, as if it had no C++ kernels: on CUDA no code has any."""
    with mock.patch.object(record, "made_for_threads", return_value=False):
        return filled(tmp_path_factory.mktemp("kept"))


@pytest.fixture
def kept(folder: Path) -> Iterator[Path]:
    """Let all programs be taken from a folder."""
    with taking(folder):
        yield folder


def some(changes: dict[str, Make], *always: str) -> pytest.MarkDecorator:
    cases = [name if name in always else pytest.param(name, marks=pytest.mark.whole) for name in changes]
    return pytest.mark.parametrize("name", cases)


def is_kept(model: Any) -> bool:
    return "kept" in model.compiled.stats().programs.values()


def taken() -> tuple[Any, Any]:
    """Return a model that has answered by kept programs, and a plain one."""
    model, plain = compiled_llm.wrap(reading_model(), **FEW_PAGES), reading_model()
    assert answer(model) == answer(plain)
    assert set(model.compiled.stats().programs.values()) == {"kept"}
    return model, plain


@some(READ, "a table")
def test_a_change_between_two_calls_is_followed_and_so_is_its_end(name: str) -> None:
    model, plain = taken()
    before = answer(plain)
    with graphs_run():
        with ExitStack() as stack:
            READ[name](stack, model, plain)
            assert answer(model) == answer(plain) != before
            assert not is_kept(model)
        assert answer(model) == before


@pytest.mark.whole
@some(READ, "an enumeration")
def test_a_change_before_wrap_is_followed(name: str) -> None:
    before = answer(reading_model())
    seen = before_wrap(READ[name])
    assert seen["said"] == seen["expected"] != before
    assert "kept" not in seen["programs"].values()


PROCESSES = 6  # that make a part of the changes each, in some minutes


@pytest.mark.whole
@pytest.mark.parametrize("number", range(PROCESSES))
def test_each_change_before_wrap_in_a_process_of_its_own_is_followed_or_raises(number: int, folder: Path) -> None:
    names = [*CHANGES][number::PROCESSES]
    program = [sys.executable, planted_runs.__file__, str(folder), *names]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    seen = dict(map(json.loads, done.stdout.splitlines()))
    assert [*seen] == names
    print(json.dumps(seen, indent=1))
    assert [name for name, each in seen.items() if each is None or not follows(each)] == []
    assert [name for name, each in seen.items() if "kept" in each["programs"].values()] == []


def follows(seen: dict[str, Any]) -> bool:
    """Whether a changed model says what HuggingFace says, or raises an error."""
    return seen["said"] == seen["expected"] or isinstance(seen["said"], str)


UNREAD = {name for name in OF_PROCESS if "setting" in name} | {"TORCH_COMPILE_DISABLE", "a substitute for a function"}
"""What only whoever compiles reads, which is compared before a program is taken."""

STILL_FIT = {"a parameter of inference mode", "a parameter that needs gradients or none", "training mode"}
"""What makes no difference to this model's programs, which compute no gradients."""


@pytest.mark.whole
@pytest.mark.parametrize("name", {**OF_CODE, **OF_MODEL, **OF_PROCESS})
def test_any_change_between_two_calls_is_followed_or_raises(name: str) -> None:
    model, plain = taken()
    with ExitStack() as stack, graphs_run():
        CHANGES[name](stack, model, plain)
        kept_calls = stack.enter_context(noting_kept_calls())
        seen = planted_runs.compared(model, plain)
    assert follows(seen), seen
    if name in STILL_FIT:
        assert seen["said"] == seen["expected"]
    elif not ("version" in name or "file of ours" in name or name in UNREAD):
        assert kept_calls == []


@contextmanager
def noting_kept_calls() -> Iterator[list[str]]:
    """Note the names of programs that are taken as they were kept while the block runs, once for each call."""
    names, own = list[str](), Taker.bound

    def bound(taker: Taker, name: str, *call: Any) -> Any:
        if (found := own(taker, name, *call)) is not None:
            names.append(name)
        return found

    with mock.patch.object(Taker, "bound", bound):
        yield names


SAME = "nothing"
WRITES: dict[str, Make] = {
    SAME: lambda stack, *models: None,
    "a write to a tensor": lambda stack, *models: [write(model) for model in models],
    "a tensor that moves": lambda stack, *models: [move(model) for model in models],
    "another parameter": lambda stack, *models: [replace(model) for model in models],
}


def write(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(-3)


def move(model: Any) -> None:
    product = model.model.layers[0].mlp.down_proj
    product.weight.data = product.weight.data.clone() * 2


def replace(model: Any) -> None:
    product = model.model.layers[0].mlp.up_proj
    product.weight = torch.nn.Parameter(product.weight.detach().flip(0))


@pytest.mark.parametrize("name", WRITES)
def test_tensors_that_were_moved_or_written_to_are_read_where_they_are(name: str) -> None:
    model, plain = taken()
    before = answer(plain)
    with ExitStack() as stack:
        WRITES[name](stack, model, plain)
        assert answer(model) == answer(plain)
    assert (answer(plain) == before) == (name == SAME)
    assert set(model.compiled.stats().programs.values()) == {"kept"}


def test_a_weight_that_is_turned_where_it_lies_is_followed() -> None:
    """It has the same address and sizes, and is the same parameter."""
    model, plain = taken()
    before = answer(plain)
    for each in (model, plain):
        weight = each.model.layers[0].self_attn.o_proj.weight
        weight.data = weight.data.t()
        assert weight.shape == weight.t().shape
    with graphs_run():
        assert answer(model) == answer(plain) != before
    assert not is_kept(model)


OVERLOOKED = ("a default in place",) if torch.__version__ < "2.13" else ()
"""Changes that programs do not follow which Dynamo has traced, as functions of ``torch.compile`` do not."""


@pytest.mark.whole
def test_random_changes_are_followed(seed: int, whole: bool) -> None:
    """Of one model after the other, each changed until its programs are given up."""
    rng, names = np.random.default_rng(seed), [*READ, *WRITES, *WRITES]
    changes, model = READ | WRITES, None
    for number in range(60 if whole else 3):
        name, early = names[rng.integers(len(names))], bool(rng.integers(2))
        print(f"seed {seed}, change {number}: {name}, {'before wrap' if early else 'between two calls'}")
        with ExitStack() as stack, graphs_run():
            if model is None or early or not is_kept(model):
                plain, unwrapped = reading_model(), reading_model()
                if early:
                    changes[name](stack, plain, unwrapped)
                model = compiled_llm.wrap(unwrapped, **FEW_PAGES)
            if not early:
                assert answer(model) == answer(plain)
                changes[name](stack, plain, model)
            assert answer(model) == answer(plain)
            assert is_kept(model) == (name in WRITES)
        if name not in OVERLOOKED:
            assert answer(model) == answer(plain)


KINDS: dict[str, tuple[str, str]] = {
    "functions": ("function ", "a default in place"),
    "classes": ("class ", "a class's table"),
    "modules": (r"model[. ]|model$", "a module"),
    "globals": (r"support\.", "a global"),
}
"""Kinds of entries, by what their names begin with, and a change that no other kind finds."""


@pytest.mark.parametrize(
    "kind",
    [kind if kind in ("functions", "globals") else pytest.param(kind, marks=pytest.mark.whole) for kind in KINDS],
)
def test_without_a_kind_of_hashes_a_wrong_program_is_taken(kind: str) -> None:
    """So the tests above would fail."""
    begins, name = KINDS[kind]
    compare = fingerprint.compare

    def without(there: Any, here: Any) -> list[str]:
        return [each for each in compare(there, here) if not re.match(begins, each)]

    with mock.patch.object(fingerprint, "compare", without):
        seen = before_wrap(READ[name])
    assert seen["said"] != seen["expected"]
    assert set(seen["programs"].values()) == {"kept"}


def test_code_without_cpp_kernels_is_taken_whatever_the_number_of_threads_is(for_any_threads: Path) -> None:
    with taking(for_any_threads), ExitStack() as stack:
        model, plain = taken()
        OF_PROCESS["threads"].make(stack, model)
        assert answer(model) == answer(plain)
        assert set(model.compiled.stats().programs.values()) == {"kept"}
        taken()


@pytest.mark.parametrize(("kernels", "threads"), [([], False), ([Path("kernel.so")], True)])
def test_only_cpp_kernels_are_made_for_a_number_of_threads(kernels: list[Path], threads: bool) -> None:
    assert record.made_for_threads([RegionCode(Path()), RegionCode(Path(), kernels)]) == threads


def test_a_model_that_was_let_go_of_is_compared_again() -> None:
    model, plain = taken()
    model.compiled.facts.version.let_go()
    with mock.patch.object(Fingerprint, "now", autospec=True, side_effect=Fingerprint.now) as compared:
        assert answer(model) == answer(plain)
    assert compared.call_count == 2
    assert set(model.compiled.stats().programs.values()) == {"kept"}


def test_why_a_call_is_traced_is_told_by_name() -> None:
    model, _ = taken()
    with mock.patch.object(Taker, "bound", autospec=True, side_effect=Taker.bound) as bound:
        answer(model)
    (taker, name, *call), manager = bound.call_args.args, model.compiled.model_runner().graph_manager
    with manager.paged(), ExitStack() as stack:
        OF_PROCESS["matmul precision"].make(stack, model)
        assert taker.bound(name, *call) is None
        assert "torch.set_float32_matmul_precision differs" in taker.misfits.pop(name)
        stack.enter_context(mock.patch.object(ProcessWatch, "holds", return_value=True))
        function, arguments = call
        assert taker.bound(name, function, {**arguments, "pages": (*arguments["pages"],)}) is None
        assert taker.misfits[name].startswith("an argument is builtins.tuple 1, and was builtins.list 1")
