"""Warm-up by a profile prepares exactly the steps that were used, the most used first within a budget.

CUDA graphs are those of ``support.execution.stand_in_cuda_graphs``, on a CPU. Models are compiled only where that
matters; then a profile of mode "eager" would be refused, which is switched off.
"""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings, strategies as st
from transformers import PreTrainedModel

import compiled_llm
from compiled_llm import Engine, SamplingParams, WrapConfig
from compiled_llm.compilation.artifacts.profile import Profile
from compiled_llm.compilation.graphs.step_key import StepKey
from compiled_llm.compilation.graphs.step_table import Budget, Cost, StepTable
from compiled_llm.compilation.program import PREFILL_EMBEDDED
from compiled_llm.execution.lifecycle.used_steps import prepare_profile, used_steps
from compiled_llm.execution.lifecycle.warmup import Warmup
from compiled_llm.execution.model_runner import ModelRunner
from support.execution.stand_in_cuda_graphs import OPTIONS, let_a_cpu_capture, one_layer
from support.parity import greedy, mixed_prompts
from support.tiny_models import tiny_qwen3


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Warmup, "_check_mode", lambda self: None)


@pytest.fixture
def cuda_graph(monkeypatch: pytest.MonkeyPatch, uncompiled: None) -> None:
    let_a_cpu_capture(monkeypatch)


def wrapped(mode: Any = "eager", **options: Any) -> PreTrainedModel:
    return compiled_llm.wrap(one_layer(), mode=mode, **{**OPTIONS, **options})


def ready_in(model: PreTrainedModel) -> set[StepKey]:
    rows = model.compiled.cuda_graphs.rows
    return {StepKey.numbered(row.phase, row.tokens, row.rows, row.variant) for row in rows if row.ready}


def rewritten(path: Path, **uses: Any) -> None:
    """Have a profile say something else."""
    profile = Profile.read(path)
    Profile(profile.made_for, **uses).save(path)


# ---- real models


@pytest.mark.usefixtures("cuda_graph")
def test_used_steps_are_prepared_and_no_others(tmp_path: Path, seed: int) -> None:
    def generate(engine: Engine) -> None:
        for count in (3, 3, 5):
            prompts = [[7 + number, 8, 9] * 6 for number in range(count)]
            engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=6))

    path, model = tmp_path / "profile.json", wrapped()
    model.compiled.warmup([1, 2])  # which are not used
    with Engine(model, max_num_seqs=8) as engine:
        generate(engine)
    greedy(model, mixed_prompts([5, 40, 3], 128, seed), 10)
    model.compiled.save_profile(path)
    profile = Profile.read(path)
    assert {step.rows for step in profile.uses if step.phase == "decode"} == {4, 8}
    assert {step.phase for step in profile.uses} == {"decode", "prefill"}
    new = wrapped()
    told: list[str] = []
    new.compiled.warmup(profile=path, report=told.append)
    anchors = [key for keys in new.compiled.model_runner().state.step_table.anchors.values() for key in keys]
    assert ready_in(new) == {*profile.uses, *anchors}, "anything else can run in those"
    assert new.compiled.stats().buckets == [4, 8]
    assert "preparing steps of 4 requests (1 of 2)" in told
    before = new.compiled.cuda_graphs.captures
    with Engine(new, max_num_seqs=8) as engine:
        generate(engine)
        assert engine.stats().cold_starts == 0
    assert new.compiled.cuda_graphs.captures == before


@pytest.mark.usefixtures("cuda_graph")
def test_a_run_that_began_with_a_profile_saves_its_counts_at_half_their_weight(tmp_path: Path, seed: int) -> None:
    path, model = tmp_path / "profile.json", wrapped()
    greedy(model, mixed_prompts([5, 4, 3], 128, seed), 9)
    model.compiled.save_profile(path)
    before = Profile.read(path)
    new = wrapped()
    new.compiled.warmup(profile=path)
    greedy(new, mixed_prompts([5], 128, seed), 9)
    new.compiled.save_profile(path)
    after = Profile.read(path)
    ((of_four, uses),) = [entry for entry in before.uses.items() if entry[0].phase == "decode"]
    assert after.uses[of_four] == uses // 2 > 0
    assert after.uses[StepKey.decode(1)] == uses


@pytest.mark.usefixtures("cuda_graph")
def test_an_engine_prepares_a_profile_within_max_graphs(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, model = tmp_path / "profile.json", wrapped()
    for lengths, tokens in (([5], 30), ([5, 4, 3], 20), ([5, 4, 3, 3, 3], 3)):
        greedy(model, mixed_prompts(lengths, 128, seed), tokens)
    model.compiled.save_profile(path)
    monkeypatch.setattr(WrapConfig, "graph_budget", property(lambda self: (None, 2)))  # refused in mode "eager"
    new = wrapped()
    with Engine(new, max_num_seqs=8) as engine:
        engine.warmup(profile=path)
        assert ready_in(new) == {StepKey.decode(1), StepKey.decode(4)}
        assert new.compiled.cuda_graphs.evictions == 0


@pytest.mark.usefixtures("uncompiled")
def test_without_cuda_graphs_sizes_of_steps_are_prepared(tmp_path: Path, seed: int) -> None:
    path, model = tmp_path / "profile.json", wrapped()
    greedy(model, mixed_prompts([5, 4, 3], 128, seed), 9)
    model.compiled.save_profile(path)
    assert set(Profile.read(path).uses) == {StepKey.decode(4)}
    new = wrapped()
    with Engine(new) as engine, pytest.raises(ValueError, match="rows 8 there, 256 here"):
        engine.warmup(profile=path)
    new = wrapped()
    new.compiled.warmup(profile=path)
    assert new.compiled.stats().buckets == [4]


def test_auto_prepares_up_to_eight_rows_on_a_cpu() -> None:
    model = wrapped(max_batch_size=24)
    told: list[str] = []
    with Engine(model, max_num_seqs=24) as engine:
        engine.warmup("auto", report=told.append)
    assert model.compiled.stats().buckets == [1, 2, 4, 8]
    assert told[-1] == "preparing steps of 8 requests (4 of 4)"
    model.compiled.warmup()
    assert model.compiled.stats().buckets == [1, 2, 4, 8, 16, 24]


# ---- refusals


@pytest.mark.usefixtures("untraced")
def test_profiles_that_cannot_be_used_are_refused_and_the_next_call_works(tmp_path: Path, seed: int) -> None:
    path, model = tmp_path / "profile.json", wrapped("compile")
    with pytest.raises(RuntimeError, match="no step has run yet; save a profile after the first requests"):
        model.compiled.save_profile(path)
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        model.compiled.warmup(profile=path)
    with pytest.raises(ValueError, match="batch_sizes='all': give numbers of rows, 'auto', or profile=PATH"):
        model.compiled.warmup("all")
    with pytest.raises(ValueError, match=r"batch_sizes=\[1\], profile='.*': give one of them"):
        model.compiled.warmup([1], profile=path)
    assert model.compiled.stats().buckets == []
    greedy(model, mixed_prompts([5], 128, seed), 4)
    model.compiled.save_profile(path)

    other = compiled_llm.wrap(tiny_qwen3(num_hidden_layers=2, eos_token_id=None), mode="compile", **OPTIONS)
    with pytest.raises(ValueError, match=r"saved for something else: parameters .* there, .* here; weights"):
        other.compiled.warmup(profile=path)
    other = wrapped("cuda-graphs")
    with pytest.raises(ValueError, match="option mode 'compile' there, 'cuda-graphs' here"):
        other.compiled.warmup(profile=path)
    eager = wrapped()
    for call in (lambda: eager.compiled.warmup(profile=path), lambda: eager.compiled.save_profile(path)):
        with pytest.raises(ValueError, match="profile: mode='eager' compiles and captures nothing"):
            call()

    new = wrapped("compile")
    rewritten(path, uses=dict.fromkeys(map(StepKey.decode, (1, 7)), 3))
    with pytest.raises(ValueError, match="a decode with tokens=7, rows=7, schedule=0; here there are tokens 1"):
        new.compiled.warmup(profile=path)
    rewritten(path, uses=dict.fromkeys([StepKey.prefill(16, 2)], 3))
    with pytest.raises(ValueError, match="prefill with tokens=16, rows=2, schedule=0; here there is no such phase"):
        new.compiled.warmup(profile=path)
    assert new.compiled.stats().buckets == []
    rewritten(path, uses=dict.fromkeys([StepKey.decode(2)], 3))
    new.compiled.warmup(profile=path)
    assert new.compiled.stats().buckets == [2]


def test_a_profile_names_only_steps_that_can_be_prepared_ahead():
    prepared: dict[StepKey | str, int] = {StepKey.decode(4): 2, StepKey.prefill(16, 2): 1, StepKey.sampling(4, True): 5}
    assert used_steps(prepared | {StepKey.decode(4, 2): 3, PREFILL_EMBEDDED: 1}) == prepared
    guessing = StepKey.decode(2, 8)._replace(drafter="ngram")
    assert used_steps({guessing: 5, StepKey.decode(2): 1}) == {StepKey.decode(2): 6}


# ---- any profile, any budget


class FakeDevice:
    """Captures as a model runner does, without a model."""

    def __init__(self, budget: Budget, sizes: dict[StepKey, int]) -> None:
        ticks = itertools.count()
        self.table = StepTable(budget, clock=lambda: float(next(ticks)))
        self.sizes, self.choices, self.rest = sizes, [], 0
        self.state = SimpleNamespace(step_table=self.table, sharing=None)
        self.config = SimpleNamespace(max_batch_size=8)
        self.prefill = SimpleNamespace(shapes=self, launches=self)
        self.steps, self.thread = self, self

    def call(self, function: Any, *arguments: Any, **named: Any) -> Any:
        return function(*arguments, **named)

    def all(self) -> list[StepKey]:
        return SHAPES

    def is_ready(self, step: StepKey) -> bool:
        return self.table.get(step) is not None

    def fits(self, shape: StepKey) -> bool:
        return True

    def make_ready(self, number: object = None, anchors: bool = True) -> None:
        assert not anchors, "they come last"

    def ready(self, step: StepKey, number: object = None, anchors: bool = True) -> None:
        assert not anchors, "they come last"
        self.record(step)

    def capture_anchors(self) -> None:
        self.rest += 1

    def capture_shapes(self, shapes: list[StepKey], only_with_room: bool = False) -> None:
        for shape in reversed(shapes):
            if not (only_with_room and self.table.full):
                self.record(shape)

    def record(self, key: StepKey) -> None:
        self.table.begin(key)
        self.table.make_room(key)
        graph = SimpleNamespace(release=lambda: None)
        self.table.add(key, cast(Any, graph), Cost(self.sizes[key], 0, 0.1), "steps")

    def prepare_deferred(self, buckets: list[int]) -> None:
        self.choices += buckets


SHAPES = [StepKey.prefill(16, 2), StepKey.prefill(16, 2, 1), StepKey.prefill(64, 2), StepKey.prefill(64, 8)]
KEYS = [
    *map(StepKey.decode, (1, 2, 4, 8)),
    *SHAPES,
    StepKey.sampling(2, False),
    StepKey.sampling(2, True),
    StepKey.sampling(8, True),
]
budgets = st.one_of(
    st.just(Budget()),
    st.integers(2, 9).map(lambda most: Budget(None, most)),
    st.tuples(st.integers(20, 60), st.none() | st.integers(2, 9)).map(lambda both: Budget(*both)),
)


@settings(derandomize=True, deadline=None, max_examples=150)
@given(
    uses=st.dictionaries(st.sampled_from(KEYS), st.integers(1, 50), min_size=1),
    budget=budgets,
    sizes=st.fixed_dictionaries({key: st.integers(1, 10) for key in KEYS}),
)
def test_the_most_used_steps_are_prepared_as_far_as_there_is_room(
    uses: dict[StepKey, int], budget: Budget, sizes: dict[StepKey, int]
) -> None:
    device = FakeDevice(budget, sizes)
    profile = Profile({}, Counter(uses))
    prepare_profile(cast(ModelRunner, device), profile, lambda doing: None)
    used = [key for key in uses if key.phase != "sampling"]
    used.sort(key=lambda key: (-uses[key], key))
    used = used[: budget.max_graphs]
    ready = set(device.table.of("decode", "prefill"))
    assert device.choices == sorted({key.rows for key in uses if key.phase == "sampling"})
    if budget.nbytes is None:
        assert ready == set(used)
        return
    assert device.table.nbytes <= budget.nbytes
    for phase in ("decode", "prefill"):
        own = [key for key in used if key.phase == phase]
        kept = [key for key in own if key in ready]
        assert kept == own[: len(kept)]
        assert bool(kept) == bool(own)
