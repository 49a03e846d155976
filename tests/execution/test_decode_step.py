"""A decode step is made once and runs until something changes: few calls, and never a step of what was.

CUDA graphs are those of ``support.execution.stand_in_cuda_graphs``, on a CPU.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from itertools import count
from statistics import median
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from compiled_llm import Engine, SamplingParams
from compiled_llm.compilation.graphs.step_key import StepKey
from compiled_llm.engine.steps.loop import Loop
from compiled_llm.execution.batch import Batch
from compiled_llm.execution.decode.decode_step import DecodeStep
from compiled_llm.execution.generate_loop import GenerateLoop
from compiled_llm.execution.pipeline import Pipeline
from compiled_llm.execution.threads.calling_thread import CallingThread
from compiled_llm.execution.threads.interrupts import _State
from compiled_llm.kvcache.step_validity import StepValidity
from support.execution.alone import Alone
from support.execution.schedule import Schedule, assert_logits, prompt_of
from support.execution.stand_in_cuda_graphs import StandIn, let_a_cpu_capture, one_layer, uncompiled
from support.noting import note_calls
from support.parity import assert_account_is_empty, greedy, mixed_prompts


@pytest.fixture(autouse=True)
def cuda_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    let_a_cpu_capture(monkeypatch)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    return uncompiled(monkeypatch)


# ---- few operators


class Operators(TorchDispatchMode):
    """Counts the operators of PyTorch that repeated steps call, without those in a CUDA graph."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self._replaying, self._counts = False, list[int]()
        launch, replay, read = DecodeStep.launch, StandIn.launch, Loop._read

        def launched(*args: Any) -> Any:
            self._counts.append(0)
            with self:
                return launch(*args)

        def replayed(graph: StandIn) -> None:
            self._replaying = True
            replay(graph)
            self._replaying = False

        def reading(*args: Any) -> Any:
            with self:
                return read(*args)

        monkeypatch.setattr(DecodeStep, "launch", launched)
        monkeypatch.setattr(StandIn, "launch", replayed)
        monkeypatch.setattr(Loop, "_read", reading)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._counts:
            self._counts[-1] += not self._replaying
        return func(*args, **(kwargs or {}))

    def of_most(self, call: Callable[[], object]) -> float:
        """Return how many most steps call, once all is captured; others make places for many, or for other rows."""
        call()
        self._counts.clear()
        call()
        assert len(self._counts) > 50
        return median(self._counts)


@pytest.mark.whole
def test_hidden_states_cost_a_step_of_generate_two_operators_at_most(model, monkeypatch, seed):
    """One copies them all; a place for many steps is made at once."""
    monkeypatch.setattr(GenerateLoop, "asynchronous", True)
    inputs, operators = mixed_prompts([5, 3, 4], 128, seed), Operators(monkeypatch)
    plain = operators.of_most(lambda: greedy(model, inputs, 100))
    asked: dict[str, Any] = {"return_dict_in_generate": True, "output_hidden_states": True}
    assert operators.of_most(lambda: greedy(model, inputs, 100, **asked)) <= plain + 2


@pytest.mark.whole
@pytest.mark.parametrize("asking", [[True, True, True], [True, False, True]], ids=["all", "two"])
def test_hidden_states_cost_a_step_of_an_engine_two_operators_at_most(model, monkeypatch, asking):
    """Rows that ask are next to each other, or not."""
    monkeypatch.setattr(Loop, "asynchronous", True)
    params, operators = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True), Operators(monkeypatch)
    with Engine(model, watch_model=False) as engine:

        def generate(asking: Sequence[bool]) -> None:
            handles = [engine.submit([3, 4, 5], params, hidden_states=[0, 1] if asks else None) for asks in asking]
            for handle in handles:
                handle.result(60)

        plain = operators.of_most(lambda: generate([False] * 3))
        assert operators.of_most(lambda: generate(asking)) <= plain + 2


# ---- and never a step of what was


class Changing(Schedule):
    """A schedule of repeated steps, and between them of changes: of rows, pages, CUDA graphs and weights."""

    models: tuple[Any, ...]

    def anything(self) -> None:
        if not self.twins or not self.has_next or min(self.left.values()) == 0:
            super().anything()
        elif self._rng.random() < 0.8:
            self.step(forced=False)
        else:
            (self.drop_the_graphs, self.replace_a_weight, self.forget, self.fork, super().anything)[
                self._rng.integers(5)
            ]()

    def drop_the_graphs(self) -> None:
        drop_the_graphs(self.generate_loop)

    def forget(self) -> None:
        """Rows forget tokens, and go on with others."""
        self.rewind()
        self.has_next = False

    def replace_a_weight(self) -> None:
        """One that no key or value depends on, since there is one layer: the twins' caches stay right."""
        for model in self.models:
            product = model.model.layers[0].mlp.down_proj
            product.weight = nn.Parameter(product.weight.detach() * 0.9)
        self.models[1].compiled.model_runner().expect_changes()


def run_schedules(monkeypatch: pytest.MonkeyPatch, seed: int, steps: int) -> float:
    """Let two loops of one model take turns; return the share of steps that were repeated."""
    plain, model = one_layer(), uncompiled(monkeypatch, kv_memory="5000 tokens", max_batch_size=9)
    rng, repeated = np.random.default_rng(seed), note_calls(monkeypatch, DecodeStep, "launch", lambda *_: None)
    schedules = [Changing(model.compiled.generate_loop(), plain, rng) for _ in range(2)]
    for schedule in schedules:
        schedule.models = plain, model
    for number in range(steps):
        for schedule in schedules if number % 10 < 2 else schedules[number // 10 % 2 :][:1]:  # in turns, and alone
            schedule.anything()
        if number % 50 == 7:
            model.generate(torch.tensor([prompt_of(5, rng)] * (1 + number % 4)), max_new_tokens=3, do_sample=False)
    steps_of_all = sum(schedule.generate_loop.steps for schedule in schedules)
    for schedule in schedules:
        schedule.close()
    assert_account_is_empty(model)
    return len(repeated) / steps_of_all


def test_steps_repeat_until_rows_pages_graphs_or_weights_change(monkeypatch, seed, request):
    whole = request.config.getoption("whole")
    for number in range(20 if whole else 1):
        share = run_schedules(monkeypatch, seed + number, 300 if whole else 100)
        assert share > 0.02, "few steps repeat between captures; none would prove nothing"


@pytest.mark.whole
def test_the_schedule_finds_steps_that_nothing_invalidates(monkeypatch, seed):
    monkeypatch.setattr(StepValidity, "invalidate", lambda self: None)
    with pytest.raises(AssertionError):
        run_schedules(monkeypatch, seed, 1000)


def forget_a_token(generate_loop: GenerateLoop) -> None:
    generate_loop.rows[0].rewind(generate_loop.rows[0].exact_length - 1)


def drop_the_graphs(generate_loop: GenerateLoop) -> None:
    manager = generate_loop.model_runner.graph_manager
    manager.cuda_graphs.forget()


def capture_another(generate_loop: GenerateLoop) -> None:
    generate_loop.model_runner.graph_manager.cuda_graphs.want(StepKey.decode(2), lambda: None)


def put_others_in_the_buffers(generate_loop: GenerateLoop) -> None:
    other = GenerateLoop(generate_loop.model_runner)
    other.admit([3, 4, 5], 20)
    other.step()
    other.step()
    other.close()


def give_slots_to_others(generate_loop: GenerateLoop) -> None:
    """Their prompts alone: the decode buffers still name the slot."""
    others = [GenerateLoop(generate_loop.model_runner) for _ in range(3)]
    for other in others:
        for _ in range(8):
            other.admit([3, 4, 5], 1)
        other.step()
    assert generate_loop.rows[0].slot is None
    for other in others:
        other.close()


@pytest.mark.drawn(most=3)
@pytest.mark.parametrize(
    "change",
    [
        GenerateLoop.fork,
        forget_a_token,
        drop_the_graphs,
        capture_another,
        put_others_in_the_buffers,
        give_slots_to_others,
    ],
)
def test_a_change_invalidates_the_step_and_the_next_is_made_of_what_there_is(model, change):
    """Also the step that a thread is about to run."""
    generate_loop, twin = model.compiled.generate_loop(), Alone(one_layer(), [3, 4, 5])
    row = generate_loop.admit([3, 4, 5], 40)
    generate_loop.step()
    for _ in range(5):
        generate_loop.step()
        twin.feed([twin.next])
    step = generate_loop._pipeline.persistent.step
    assert step is not None
    assert step.is_valid_for(Batch([row]))
    kept = change(generate_loop)
    assert not step.is_valid_for(Batch([row]))
    if change is forget_a_token:
        twin = Alone(one_layer(), twin.fed[:-1])
    for forced in (7, None, None, None):
        generate_loop.step(None if forced is None else torch.tensor([forced]))
        twin.feed([twin.next if forced is None else forced])
        torch.testing.assert_close(generate_loop.logits()[0], twin.logits, rtol=1e-3, atol=1e-3)
    last = generate_loop._pipeline.persistent.step
    assert last is not None
    assert last.is_valid_for(Batch([row]))
    assert last._launch.alone, "no capture waits any more"
    for each in (generate_loop, kept):
        if each is not None:
            each.close()
    assert_account_is_empty(model)


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("in_an_engine", [False, True])
def test_ctrl_c_arrives_before_the_next_replay(model, monkeypatch, in_an_engine):
    """A replay is not interrupted; while all steps are replays, Ctrl-C still has to arrive."""
    replays, launch = count(1), StandIn.launch

    def press(graph: StandIn) -> None:
        if next(replays) == 30:
            signal.raise_signal(signal.SIGINT)
        launch(graph)

    def generate() -> None:
        if in_an_engine:
            engine.generate([3, 4, 5], SamplingParams(max_tokens=100, temperature=0, ignore_eos=True))
        else:
            model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=100, do_sample=False)

    with Engine(model, watch_model=False) as engine:
        generate()  # captures what it needs
        monkeypatch.setattr(StandIn, "launch", press)
        with pytest.raises(KeyboardInterrupt):
            generate()
        assert next(replays) == 31
        generate()
    assert_account_is_empty(model)


STEP = (
    GenerateLoop.step,
    Pipeline.repeat,
    Pipeline._add,
    Pipeline.read,
    DecodeStep.is_valid_for,
    DecodeStep.launch,
    DecodeStep._advance,
    CallingThread.call_briefly,
)
"""The functions that a repeated step of ``generate`` runs in."""


def pressed_at(code: CodeType, line: int, after: int, function: Callable[[], object]) -> bool:
    """Press Ctrl-C when a line has run so often; whether it was, and has arrived."""
    left = [after]

    def press(frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code is not code:
            return None
        if event == "line" and frame.f_lineno == line:
            left[0] -= 1
            if left[0] == 0:
                signal.raise_signal(signal.SIGINT)
        return press

    sys.settrace(press)
    try:
        function()
    except KeyboardInterrupt:
        assert left[0] <= 0
        return True
    finally:
        sys.settrace(None)
    assert left[0] > 0, "it never came"
    return False


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("captured", [False, True])
def test_ctrl_c_at_each_line_of_a_repeated_step_leaves_whole_rows(captured, monkeypatch, seed, request):
    """Wherever it comes, all rows have taken the step or none has, and they go on from there."""
    stride, arrived = 1 if request.config.getoption("whole") else 4, 0
    if not captured:
        monkeypatch.undo()  # steps run kernel by kernel, and are interrupted
    model = uncompiled(monkeypatch)
    plain, rng = one_layer(), np.random.default_rng(seed)
    twins = [Alone(plain, prompt_of(length, rng)) for length in (3, 6)]
    prompts = [list(twin.fed) for twin in twins]
    for twin in twins * 12:
        twin.feed([twin.next])
    places = [(each.__code__, line) for each in STEP for line in lines_of(each.__code__)]
    for code, line in places[seed % stride :: stride]:
        generate_loop = model.compiled.generate_loop()
        rows = [generate_loop.admit(prompt, 20) for prompt in prompts]
        arrived += pressed_at(code, line, 4, lambda loop=generate_loop: steps_of(loop, 10))
        where = code.co_name, line
        assert (_State.allowed, _State.pending) == (True, False), where
        assert rows[0].exact_length - 3 == rows[1].exact_length - 6, where
        assert all(row.exact_position == row.exact_length for row in rows), where
        assert all(len(row.pages) == model.compiled.model_runner().pool.pages_for(row.exact_length) for row in rows), (
            where
        )
        generate_loop.step(torch.tensor([7, 8]))
        there = [
            Alone(plain, [*twin.fed[: row.exact_length - 1], token])
            for twin, row, token in zip(twins, rows, (7, 8), strict=True)
        ]
        assert_logits(generate_loop, *there)
        generate_loop.close()
        assert_account_is_empty(model)
    assert arrived > 30 / stride


def steps_of(generate_loop: GenerateLoop, count: int) -> None:
    for _ in range(count):
        generate_loop.step()


def lines_of(code: CodeType) -> list[int]:
    return sorted({line for _, _, line in code.co_lines() if line is not None})
