"""An engine asks a policy of chunks, and times the steps that it wants to know of."""

from __future__ import annotations

import functools
import random

import numpy as np
import pytest

import compiled_llm
from compiled_llm.engine.chunks.stretched import Stretched
from compiled_llm.engine.chunks.whole import Whole
from compiled_llm.engine.chunks.within import Within
from compiled_llm.engine.steps import loop
from compiled_llm.engine.steps.loop import Loop
from compiled_llm.engine.steps.plan import StepPlan
from compiled_llm.engine.steps.request import Request
from compiled_llm.engine.steps.scheduler import Scheduler
from compiled_llm.engine.steps.token_budget import TokenBudget
from compiled_llm.execution.state.device_timer import DeviceTimer
from compiled_llm.kvcache.pool import PagePool
from support.engine.tiny_engines import PATIENCE, greedy, wrapped
from support.execution.stand_in_cuda_graphs import let_a_cpu_capture, uncompiled
from support.noting import note_calls
from support.tiny_models import tiny_qwen3


@pytest.mark.parametrize(
    ("most", "decoding", "tokens"),
    [(4096, 100, 3996), (4096, 4090, 16), (32, 20, 16), (16, 1, 15), (16, 12, 8), (2, 1, 1), (2, 2, 1)],
)
def test_chunks_of_mixed_steps_leave_room_for_running_rows(most: int, decoding: int, tokens: int) -> None:
    """As long as prompts go on; also where little fits into a step."""
    rows = [Request(prompt=np.arange(3), sampling=None, max_tokens=9, stop_token_ids=frozenset())] * decoding
    scheduler = Scheduler(PagePool(9, 4), 2, lambda *_: 1)
    assert TokenBudget(Whole(), most, mixed=True).tokens(scheduler, rows) == tokens


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "max_step_ms" in record.getMessage()]


def test_a_limit_below_the_smallest_steps_is_told_once_with_the_least(caplog: pytest.LogCaptureFixture) -> None:
    token_budget = TokenBudget(Within(2.5), max_tokens=4096)
    token_budget.ran(3, 16, 5.0)  # odd ones, with others between
    token_budget.ran(3, 16, 0.002)
    for _ in range(2):
        token_budget.ran(3, 16, 5.0)
    token_budget.ran(3, 32, 0.02)  # could have been a smaller one
    token_budget.ran(64, 0, 0.02)
    token_budget.ran(3, 16, 0.0025)
    assert not warnings_of(caplog)
    for seconds in (0.0041, 0.0123456, 0.0039, 0.004, 0.004, 0.004):
        token_budget.ran(4, 15, seconds)
    (said,) = warnings_of(caplog)
    assert "max_step_ms=2.5: one step (running requests: 4, tokens of prompts: 15) takes 4.1 ms" in said
    assert said.endswith("give at least max_step_ms=4.2")
    least = TokenBudget(Within(4.2), max_tokens=4096)
    for _ in range(9):
        least.ran(4, 15, 0.0041)
    assert len(warnings_of(caplog)) == 1


@pytest.mark.parametrize("mixed", [False, True])
def test_an_engine_tells_which_steps_take_longer_than_they_may(
    mixed: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeviceTimer, "seconds", property(lambda _: 0.01))
    with compiled_llm.Engine(wrapped(), mixed=mixed, max_step_ms=8) as engine:
        first = engine.submit([5, 6, 7], greedy(60))
        next(iter(first))
        engine.submit(list(range(3, 103)), greedy(2)).result(PATIENCE)
        first.result(PATIENCE)
    (said,) = warnings_of(caplog)
    what = "one mixed step" if mixed else "one step"
    assert f"max_step_ms=8: {what} (running requests: 1, tokens of prompts: 16) takes 10 ms" in said
    assert said.endswith("give at least max_step_ms=10.1")


def test_the_engine_runs_prompts_in_chunks_that_it_has_timed(monkeypatch, seed):
    """A timer that shows 1 ms for each token: 40 ms leave room for chunks of 32."""
    plans: list[list[int]] = []
    launch = Loop._launch

    def launched(self: Loop, plan):  # type: ignore[no-untyped-def]
        plans.append([len(chunk.ids) for chunk in plan.extend])
        launch(self, plan)

    monkeypatch.setattr(Loop, "_launch", launched)
    monkeypatch.setattr(DeviceTimer, "seconds", property(lambda _: 0.001 * max(1, sum(plans[-1]))))
    model = wrapped(4000, tiny_qwen3(), page_size=16)
    draw = random.Random(seed)
    prompts = [[draw.randrange(3, 128) for _ in range(200)] for _ in range(3)]
    with compiled_llm.Engine(model, max_num_seqs=4, max_step_ms=40, prefix_cache=False) as engine:
        engine.generate(prompts, compiled_llm.SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    sizes = [sum(plan) for plan in plans if plan]
    assert sum(sizes) == 600
    assert max(sizes) <= 40
    assert 32 in sizes


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("follows", [False, True])
def test_chunks_are_short_beside_answers_that_somebody_follows(
    follows: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A timer that shows 10 ms, and 0.1 ms for each token of prompts: 60 tokens make it 1.6 times as long."""
    plans: list[tuple[int, int]] = []
    launch = Loop._launch

    def launched(self: Loop, plan: StepPlan) -> None:
        plans.append((len(plan.decode), sum(len(chunk.ids) for chunk in plan.extend)))
        launch(self, plan)

    monkeypatch.setattr(Loop, "_launch", launched)
    monkeypatch.setattr(DeviceTimer, "seconds", property(lambda _: 0.01 + 0.0001 * plans[-1][1]))
    model = wrapped(4000, tiny_qwen3(), page_size=16)
    draw = random.Random(seed)
    prompts = [[draw.randrange(3, 128) for _ in range(200)] for _ in range(8)]
    monkeypatch.setattr(loop, "chunks_of", lambda *_: Stretched(often=0.001, steps=100))
    with compiled_llm.Engine(model, max_num_seqs=4, prefix_cache=False) as engine:
        first = engine.submit(prompts[0], greedy(100))
        if follows:
            first.when_changed(lambda: None)
        handles = [engine.submit(prompt, greedy(4)) for prompt in prompts[1:]]
        for handle in (first, *handles):
            handle.result(PATIENCE)
    beside = {tokens for rows, tokens in plans if rows and tokens}
    assert sum(tokens for _, tokens in plans) == 1600
    assert (48 in beside) == follows
    assert follows or min(beside) >= 200


@pytest.mark.whole
@pytest.mark.parametrize("policy", [Within(1000.0), Stretched()])
def test_steps_are_repeated_though_some_are_timed(policy: Within | Stretched, monkeypatch: pytest.MonkeyPatch) -> None:
    let_a_cpu_capture(monkeypatch)
    monkeypatch.setattr(Loop, "asynchronous", True)
    model = uncompiled(monkeypatch)
    launched: list[int] = []
    for chunks in (Whole(), policy):
        monkeypatch.setattr(loop, "chunks_of", functools.partial(_given, chunks))
        launches = note_calls(monkeypatch, Loop, "_launch", lambda *_: None)
        learnt = note_calls(monkeypatch, TokenBudget, "ran", lambda _, decoding, tokens, *__: (decoding, tokens))
        with compiled_llm.Engine(model, watch_model=False) as engine:
            answer_two(engine)
            launches.clear()
            learnt.clear()
            answer_two(engine)
        launched.append(len(launches))
        assert chunks is policy or not learnt
    assert launched[0] == launched[1] < 30
    assert 3 <= learnt.count((2, 0)) <= 10


def _given(policy: Whole | Within | Stretched, *_: object) -> Whole | Within | Stretched:
    return policy


def answer_two(engine: compiled_llm.Engine) -> None:
    """Let two requests that somebody follows begin in one step."""
    with engine.paused():
        handles = [engine.submit(prompt, greedy(60)) for prompt in ([3, 4, 5], [6, 7, 8, 9])]
        for handle in handles:
            handle.when_changed(lambda: None)
    for handle in handles:
        handle.result(PATIENCE)


def test_nothing_is_timed_for_whoever_waits_for_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    learnt = note_calls(monkeypatch, TokenBudget, "ran", lambda _, decoding, tokens, *__: (decoding, tokens))
    monkeypatch.setattr(loop, "chunks_of", lambda *_: Stretched())
    with compiled_llm.Engine(wrapped()) as engine:
        engine.generate([[3, 4, 5], [6, 7, 8, 9]], greedy(60))
        engine.submit([5, 6, 7], greedy(40)).result(PATIENCE)
    assert not learnt


def test_warmup_prepares_all_sizes(seed):
    model = wrapped(4000, max_batch_size=2)
    with compiled_llm.Engine(model, max_num_seqs=20) as engine:
        engine.warmup()
        assert model.compiled.stats().buckets == [1, 2, 4, 8, 16, 20]
        with pytest.raises(ValueError, match="rows: 21 is not a whole number between 1 and max_num_seqs=20"):
            engine.warmup([21])
