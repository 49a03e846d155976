"""CUDA graphs are captured while steps run, on a CPU: rows come and go, captures are late or fail, tokens stay right.

See ``support.execution.stand_in_cuda_graphs``. Programs are compiled only where that matters.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

import compiled_llm
from compiled_llm.compilation.graphs.cuda_graphs import CudaGraphs
from compiled_llm.compilation.graphs.slices import SlicedThread
from compiled_llm.compilation.graphs.step_key import StepKey
from compiled_llm.compilation.graphs.step_table import ATTEMPTS, StepTable
from compiled_llm.execution.generate_loop import GenerateLoop
from compiled_llm.execution.pipeline import Pipeline
from compiled_llm.execution.steps.dispatcher import Dispatch, Dispatcher
from compiled_llm.execution.steps.steps import Steps
from compiled_llm.kvcache.row import Row
from compiled_llm_ops.reference.backend import Reference
from support.execution.model_changes import other_attribute
from support.execution.page_checks import check_pages, wrong_tags
from support.execution.stand_in_cuda_graphs import (
    OPTIONS,
    StandIn,
    StandInGraphCapture,
    finish_all,
    let_captures_be_late,
    one_layer,
    uncompiled,
)
from support.in_threads import in_thread
from support.noting import note_calls
from support.parity import alone, assert_account_is_empty, greedy, mixed_prompts

LENGTHS = [1, 3, 9, 15, 20, 31, 50, 70]
LONGEST = 24


@pytest.fixture(autouse=True)
def cuda_graph(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    let_captures_be_late(monkeypatch, slices=float("inf"))
    yield
    finish_all()


def prompt_of(length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(3, 128) for _ in range(length)]


def runner_of(model: Any, exact: bool) -> GenerateLoop:
    """A loop; one that is not exact pads steps as an engine's does."""
    generate_loop: GenerateLoop = model.compiled.generate_loop()
    if not exact:
        generate_loop._pipeline = Pipeline(model.compiled.model_runner())
    return generate_loop


class Rows(RuleBasedStateMachine):
    """Rows on one model, each with the tokens that HuggingFace's model gives it."""

    model: Any
    expected: dict[int, list[int]]
    budget: int | None
    caplog: pytest.LogCaptureFixture

    exact: bool

    def __init__(self) -> None:
        super().__init__()
        self.model_runner = self.model.compiled.model_runner()
        self.cuda_graphs = self.model_runner.graph_manager.cuda_graphs
        self.cuda_graphs.forget()
        self.before = self.model.compiled.cuda_graphs
        self.caplog.clear()
        self.failed = 0
        self.generate_loop = runner_of(self.model, self.exact)
        self.lengths: dict[Row, int] = {}
        self.tokens: dict[Row, list[int]] = {}

    @precondition(lambda self: len(self.lengths) < 8)
    @rule(lengths=st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=4))
    def admit(self, lengths: list[int]) -> None:
        for length in lengths[: 8 - len(self.lengths)]:
            row = self.generate_loop.admit(prompt_of(length), LONGEST + 2)
            self.lengths[row], self.tokens[row] = length, []
        self.step(1)

    @precondition(lambda self: self.lengths)
    @rule(count=st.integers(1, 5), late=st.booleans())
    def step(self, count: int, late: bool = True) -> None:
        if not late:
            finish_all()
        for _ in range(count):
            self.read(self.generate_loop.step())
            for row in [row for row, tokens in self.tokens.items() if len(tokens) >= LONGEST]:
                self.release(row)
            if not self.lengths:
                return

    @precondition(lambda self: self.lengths)
    @rule(which=st.integers(0, 7))
    def leave(self, which: int) -> None:
        self.release(list(self.lengths)[which % len(self.lengths)])

    def release(self, row: Row) -> None:
        self.generate_loop.release(row)
        del self.lengths[row], self.tokens[row]

    def read(self, tokens: dict[Row, int]) -> None:
        for row, token in tokens.items():
            if row in self.tokens:
                self.tokens[row].append(token)

    @precondition(lambda self: StandInGraphCapture.late)
    @rule(fails=st.sampled_from([False, False, True]))
    def a_capture_ends(self, fails: bool) -> None:
        if fails and StandInGraphCapture.late:
            StandInGraphCapture.late.pop().fail()
            self.failed += 1
        finish_all()

    @precondition(lambda self: self.generate_loop.steps > 40)
    @rule()
    def the_model_changes(self) -> None:
        """All CUDA graphs go, and the one that is underway with them."""
        self.cuda_graphs.forget()

    @invariant()
    def tokens_are_huggingfaces(self) -> None:
        for row, tokens in self.tokens.items():
            assert tokens == self.expected[self.lengths[row]][: len(tokens)]

    @invariant()
    def one_at_a_time_within_the_budget(self) -> None:
        assert len(StandInGraphCapture.late or []) <= 1
        table = self.model.compiled.cuda_graphs
        assert self.budget is None or table.ready <= self.budget
        assert table.failures - self.before.failures <= self.failed
        assert table.captures - self.before.captures <= table.misses - self.before.misses + 8  # some were waited for

    def teardown(self) -> None:
        finish_all()
        while self.lengths:
            self.step(1)
        self.generate_loop.close()
        assert_account_is_empty(self.model)
        failures = self.model.compiled.cuda_graphs.failures - self.before.failures
        said = [record for record in self.caplog.records if record.levelno == logging.WARNING]
        assert failures <= self.failed
        assert len(said) == (failures > 0 and not self.before.failures), "once for a model"


@pytest.fixture(params=[False, True], ids=["own decode", "planned"])
def plans_decode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode steps attend by our own ops, or are planned as FlashInfer's are."""
    if request.param:
        monkeypatch.setattr(Reference, "decode_ops", lambda self, device: None)


@pytest.mark.drawn(most=1)
@pytest.mark.usefixtures("plans_decode")
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("budget", [None, 2, pytest.param(4, marks=pytest.mark.whole)])
def test_tokens_are_right_whatever_is_captured_and_when(
    budget: int | None,
    exact: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    request: pytest.FixtureRequest,
) -> None:
    reference, examples = one_layer(), 30 if request.config.getoption("whole") else 8
    expected = {length: alone(reference, prompt_of(length), LONGEST + 2) for length in LENGTHS}
    caplog.set_level(logging.WARNING, "compiled_llm.graphs")
    model = check_pages(uncompiled(monkeypatch, budget, kv_memory="800 tokens"))  # a page soon has another owner
    known = {"model": model, "expected": expected, "budget": budget, "exact": exact, "caplog": caplog}
    made = type("OneBudget", (Rows,), known)
    run_state_machine_as_test(
        made, settings=settings(derandomize=True, deadline=None, max_examples=examples, stateful_step_count=30)
    )
    table = model.compiled.cuda_graphs
    print(table)
    assert table.misses > 20
    assert table.failures > 0
    assert (table.evictions > 0) == (budget is not None)
    assert (table.padded > 0) == (not exact)


def steps_of(generate_loop: GenerateLoop, count: int) -> list[int]:
    """Run steps, and return which bucket each ran in."""
    buckets = []
    for _ in range(count):
        generate_loop.step()
        buckets.append(generate_loop._pipeline.persistent.bucket)
    return buckets


def admitted(model: Any, rows: int, exact: bool = False) -> GenerateLoop:
    generate_loop = runner_of(model, exact)
    for _ in range(rows):
        generate_loop.admit(prompt_of(9), 40)
    generate_loop.step()
    model_runner = model.compiled.model_runner()
    while model_runner.graph_manager.cuda_graphs.background_captures:  # the prefill
        model_runner.thread.call(model_runner.run_capture_slices)
        finish_all()
        model_runner.thread.call(model_runner.graph_manager.cuda_graphs.adopt)
    return generate_loop


def counts(model: Any, rows: int) -> tuple[int, int, int, int]:
    """How often the decode step of so many rows was captured, replayed and missed, and ran in a larger one."""
    found = [row for row in model.compiled.cuda_graphs if (row.phase, row.rows) == ("decode", rows)]
    return (found[0].captures, found[0].replays, found[0].misses, found[0].padded) if found else (0, 0, 0, 0)


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize(
    ("exact", "largest", "ran"),
    [(False, True, 8), (True, True, 4), (False, False, 4)],
    ids=["padded", "exact", "alone"],
)
def test_a_step_without_its_graph_runs_in_the_next_larger_or_as_it_is_until_it_is_captured(
    exact: bool, largest: bool, ran: int
) -> None:
    model = compiled_llm.wrap(one_layer(), mode="eager", **OPTIONS)
    model.compiled.warmup([2])
    assert model.compiled.stats().buckets == [2, 8], "all can run in the largest"
    if not largest:
        model.compiled.model_runner().state.step_table._evict(
            model.compiled.model_runner().state.step_table.entries[StepKey.decode(8)]
        )
    generate_loop = admitted(model, 3, exact)
    finish_all()  # of the prefill
    assert steps_of(generate_loop, 3) == [ran] * 3
    assert counts(model, 4) == (0, 0, 3, 3 * (ran == 8)), "no step waits for it"
    finish_all()
    assert steps_of(generate_loop, 2) == [4, 4]
    assert counts(model, 4) == (1, 2, 3, 3 * (ran == 8))
    assert model.compiled.events.used[StepKey.decode(4)] >= 5, "a profile names the bucket that was wanted"
    assert model.compiled.events.used[StepKey.decode(8)] == 0
    assert not model.compiled.events.cold_starts


@pytest.mark.drawn(most=1)
@pytest.mark.usefixtures("plans_decode")
def test_the_padding_that_runs_before_a_capture_writes_to_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of padding have a table of their own: that of rows that have ended names pages that others have by now."""
    monkeypatch.setattr(StandInGraphCapture, "slices", 2)
    model = check_pages(compiled_llm.wrap(one_layer(), mode="eager", **{**OPTIONS, "kv_memory": "200 tokens"}))
    model.compiled.warmup([2])
    begun = note_calls(monkeypatch, Steps, "_begin_capture", lambda _, step: step)
    generate_loop = runner_of(model, exact=False)
    for lengths, steps in [([60, 60, 40], 0), ([27, 26], 8), ([27, 26], 8), ([60, 60, 40], 8)]:
        rows = [generate_loop.admit(prompt_of(length), steps + 1) for length in lengths]
        for _ in range(steps + 1):
            generate_loop.step()
        generate_loop.drain()
        for row in rows:
            generate_loop.release(row)
    assert begun, "three rows ran in the step of eight, and theirs was captured"
    assert wrong_tags(model) == 0


@pytest.mark.whole
@pytest.mark.parametrize(("budget", "least"), [(3, 512), (8, 128), (None, 32)])
def test_no_prompt_runs_in_far_more_tokens_than_its_own(
    budget: int | None, least: int, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Whatever else is captured: of few CUDA graphs some are large enough for all prompts, and some small enough."""
    monkeypatch.setattr(StandInGraphCapture, "slices", 2)
    served: list[tuple[StepKey, StepKey]] = []
    dispatch = Dispatcher.dispatch

    def noted(self: Dispatcher, step: StepKey, exact: bool) -> Dispatch:
        picked = dispatch(self, step, exact)
        if step.phase == "prefill":
            served.append((step, picked.step))
        return picked

    monkeypatch.setattr(Dispatcher, "dispatch", noted)
    model, rng = uncompiled(monkeypatch, budget), random.Random(seed)
    model.compiled.warmup([1, 2])
    for _ in range(30):
        generate_loop = runner_of(model, exact=False)
        for _ in range(rng.randint(1, 8)):
            generate_loop.admit(prompt_of(rng.choice([*LENGTHS, 200])), 40)
        for _ in range(rng.randint(1, 8)):
            generate_loop.step()
        generate_loop.close()
    for wanted, ran in served:
        assert ran.tokens <= max(4 * wanted.tokens, least), f"{wanted} ran in {ran}"
    assert {wanted == ran for wanted, ran in served} == {True, False}, "in larger ones while their own are captured"
    steps = model.compiled.model_runner().state.step_table
    anchors = steps.anchors["prefill"]
    assert {*anchors, *steps.anchors["decode"]} <= {*steps.of("decode", "prefill")}
    table = model.compiled.cuda_graphs
    print(table)
    assert table.captures > len(anchors) + 3 or budget == 3


def test_an_evicted_graph_is_released_when_it_has_ended_and_no_step_waits_for_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[bool] = []
    model = uncompiled(monkeypatch, 4)
    model.compiled.warmup([2])
    model_runner = model.compiled.model_runner()
    steps, cuda_graphs = model_runner.state.step_table, model_runner.graph_manager.cuda_graphs
    monkeypatch.setattr(steps, "_mark", lambda: lambda: bool(ended))
    monkeypatch.setattr(steps, "_wait", lambda: pytest.fail("it waits for the device"))
    evicted, generate_loop = steps.get(StepKey.decode(2)).cuda_graph, runner_of(model, exact=False)
    for _ in range(3):
        generate_loop.admit(prompt_of(9), 40)
    for _ in range(6):
        generate_loop.step()
        finish_all()
    table = model.compiled.cuda_graphs
    assert (table.evictions, table.captures, evicted.released) == (1, 5, False)
    assert (table.nbytes, table.ready) == (steps.shared.total() + 1000 + kept_by(steps), 4)
    assert cuda_graphs.background_captures
    ended.append(True)
    for _ in range(3):
        generate_loop.step()
        finish_all()
    assert evicted.released
    assert model.compiled.cuda_graphs.captures == 6, "captures go on"
    assert not steps.releases_later


def kept_by(steps: StepTable) -> int:
    return sum(steps.get(key).nbytes for key in steps.of("decode", "prefill"))  # type: ignore[union-attr]


def test_a_failed_capture_is_logged_once_counted_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "compiled_llm.graphs")
    model = compiled_llm.wrap(one_layer(), mode="eager", **OPTIONS)
    model.compiled.warmup([1])
    for rows in (2, 4):
        generate_loop = admitted(model, rows)
        finish_all()
        for _ in range(ATTEMPTS):
            assert steps_of(generate_loop, 1) == [rows]
            assert StandInGraphCapture.late
            StandInGraphCapture.late.pop().fail()
        assert steps_of(generate_loop, 2) == [rows, rows]
        assert not StandInGraphCapture.late, "it is not tried again by itself"
        generate_loop.close()
    said = [record for record in caplog.records if "could not be captured" in record.message]
    assert [record.levelname for record in said] == ["WARNING", *["DEBUG"] * (2 * ATTEMPTS - 1)]
    assert "no capture" in said[0].message
    assert model.compiled.cuda_graphs.failures == 2 * ATTEMPTS
    model.compiled.warmup([2, 4])
    assert counts(model, 2)[0] == counts(model, 4)[0] == 1


def test_a_capture_that_failed_by_chance_is_made_by_a_later_step() -> None:
    model = compiled_llm.wrap(one_layer(), mode="eager", **OPTIONS)
    model.compiled.warmup([1])
    generate_loop = admitted(model, 2)
    finish_all()
    for failing in (True, False):
        assert steps_of(generate_loop, 1) == [2]
        if failing:
            StandInGraphCapture.late.pop().fail()
    finish_all()
    steps_of(generate_loop, 1)
    table = model.compiled.cuda_graphs
    assert (table.failures, counts(model, 2)[0]) == (1, 1)
    generate_loop.close()


def test_no_capture_goes_on_when_a_call_or_the_engine_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = note_calls(monkeypatch, StandInGraphCapture, "begin", lambda *_: 1)
    monkeypatch.setattr(StandInGraphCapture, "slices", 100)
    model = compiled_llm.wrap(one_layer(), mode="eager", **OPTIONS)
    model.compiled.warmup([1])
    greedy(model, mixed_prompts([5, 9], 128, 1), 3)
    assert not StandInGraphCapture.late
    assert begun
    kept = greedy(model, mixed_prompts([5, 9, 20], 128, 1), 3, return_dict_in_generate=True)
    assert not StandInGraphCapture.late
    kept.past_key_values.close()
    begun.clear()
    with compiled_llm.Engine(model) as engine:
        engine.generate([prompt_of(5)] * 5, compiled_llm.SamplingParams(temperature=0.0, max_tokens=3))
        assert not StandInGraphCapture.late
        assert begun


def test_an_engine_captures_the_step_that_all_rows_run_in_before_those_that_ran_while_they_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Captures take a few steps each; the second load misses none."""
    monkeypatch.setattr(StandInGraphCapture, "slices", 3)
    monkeypatch.setattr(StandInGraphCapture, "run_slices", one_slice)
    begun = note_calls(monkeypatch, CudaGraphs, "begin", lambda _, key, step: key)
    model = uncompiled(monkeypatch, prefill_tokens=64)
    model.compiled.warmup([1])
    model.compiled.model_runner().graph_manager.forget_graphs()
    before = model.compiled.cuda_graphs.misses
    with compiled_llm.Engine(model, mixed=False, prefix_cache=False) as engine:
        for load in range(2):
            prompts = [[*prompt_of(20), load] for _ in range(8)]
            engine.generate(prompts, compiled_llm.SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
            missed, before = model.compiled.cuda_graphs.misses - before, model.compiled.cuda_graphs.misses
            assert (missed == 0) == (load == 1)
    print(begun)
    assert begun[0] == StepKey.decode(8)
    assert {"prefill", "decode"} == {key.phase for key in begun[1:]}


def one_slice(self: StandInGraphCapture, ended: Callable[[], bool]) -> None:
    self._left -= 1
    if not self._left:
        self.finish()


@pytest.mark.whole
@pytest.mark.usefixtures("without_inductor")
def test_a_model_that_changes_while_its_step_is_captured_computes_as_changed() -> None:
    reference, model = one_layer(), compiled_llm.wrap(one_layer(), **OPTIONS)
    model.compiled.warmup([4])
    inputs = mixed_prompts([5, 18], 128, 1)
    generate_loop = admitted(model, 2)
    finish_all()
    steps_of(generate_loop, 1)
    assert StandInGraphCapture.late
    other_attribute(model)
    finish_all()  # it finds out that it would have to compile
    generate_loop.close()
    other_attribute(reference)
    torch.testing.assert_close(greedy(model, inputs, 12), greedy(reference, inputs, 12))
    assert model.compiled.cuda_graphs.failures == 1


class InAThread(StandInGraphCapture):
    """Captures in slices in a thread of its own, as a capturer of CUDA graphs does."""

    thread = SlicedThread("stand-in")

    def begin(self, launch: Callable[[], Any], check: Callable[[], None]) -> Future[Any]:
        def captured() -> StandIn:
            for _ in range(10):
                time.sleep(0.0002)
                self.thread.pause()
            with torch.no_grad():
                check()
            return self.capture(launch)

        return self.thread.submit(captured)

    def run_slices(self, ended: Callable[[], bool]) -> None:
        self.thread.run_slices(ended)

    def finish(self) -> None:
        in_thread(self.thread.finish, 20)


@pytest.mark.whole
@pytest.mark.usefixtures("without_inductor")
def test_an_engine_goes_on_while_another_thread_captures(monkeypatch: pytest.MonkeyPatch, whole: bool) -> None:
    """Of programs that are compiled, if all is asked for."""
    monkeypatch.setattr("support.execution.stand_in_cuda_graphs.StandInGraphCapture", InAThread)
    reference = one_layer()
    model = compiled_llm.wrap(one_layer(), **OPTIONS, max_graphs=4) if whole else uncompiled(monkeypatch, 4)
    lengths = [3, 50, 9, 20, 1, 15] * 2
    expected = {length: alone(reference, prompt_of(length), 14) for length in set(lengths)}
    with compiled_llm.Engine(model, prefix_cache=False) as engine:
        engine.warmup([1, 2])
        for count in (1, 12, 3, 5, 12, 2, 1):
            params = [compiled_llm.SamplingParams(temperature=0.0, max_tokens=4 + n % 11) for n in range(count)]
            outputs = engine.generate([prompt_of(length) for length in lengths[:count]], params)
            for length, output in zip(lengths, outputs, strict=False):
                assert output.token_ids == expected[length][: len(output.token_ids)]
            assert InAThread.thread.idle
    table = model.compiled.cuda_graphs
    assert (table.failures, model.compiled.stats().recompiles) == (0, 0)
    assert min(table.misses, table.padded, table.captures, table.evictions) > 2
    assert_account_is_empty(model)


@pytest.mark.whole
@pytest.mark.usefixtures("without_inductor", "one_thread")
def test_nothing_is_compiled_again_when_pytorch_gets_another_number_of_threads_after_the_first_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread that captures lives as long as the process, and each thread has its own number."""
    monkeypatch.setattr("support.execution.stand_in_cuda_graphs.StandInGraphCapture", InAThread)
    in_thread(InAThread.thread.finish, 20)
    InAThread.thread.submit(lambda: torch.set_num_threads(3))
    in_thread(InAThread.thread.finish, 20)
    torch.set_num_threads(1)
    model = compiled_llm.wrap(one_layer(), **OPTIONS)
    for _ in range(2):
        greedy(model, mixed_prompts([5, 9, 20], 128, 1), 6)
    assert (model.compiled.stats().recompiles, model.compiled.cuda_graphs.failures) == (0, 0)
    assert model.compiled.cuda_graphs.captures > 4
