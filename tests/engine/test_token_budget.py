"""Chunks grow until steps take as long as they may, and no longer."""

from __future__ import annotations

import random

import pytest

import compiled_llm
from compiled_llm.engine.steps.loop import Loop
from compiled_llm.engine.steps.token_budget import TokenBudget
from compiled_llm.execution.state.device_timer import DeviceTimer
from support.engine.tiny_engines import PATIENCE, greedy, wrapped
from support.execution.stand_in_cuda_graphs import let_a_cpu_capture, uncompiled
from support.noting import note_calls
from support.tiny_models import tiny_qwen3


def device(decoding: int, tokens: int, per_token: float = 1e-5) -> float:
    """Seconds of a step on an imagined device."""
    return (0.002 + 1e-5 * decoding if decoding else 0.0) + (0.001 + per_token * tokens if tokens else 0.0)


def run(token_budget: TokenBudget, steps: int, decoding: int, **speed: float) -> list[float]:
    """Steps of as many tokens as the pace allows, beside rows whose own steps are known; returns how long they took."""
    token_budget.ran(decoding, 0, device(decoding, 0))
    lengths = []
    for _ in range(steps):
        tokens = token_budget.tokens(decoding)
        lengths.append(device(decoding, tokens, **speed))
        token_budget.ran(decoding, tokens, lengths[-1])
    return lengths


def test_without_a_limit_chunks_are_as_long_as_they_may_be():
    token_budget = TokenBudget(None, max_tokens=4096)
    assert token_budget.tokens(0) == token_budget.tokens(200) == 4096
    assert not token_budget.bounded


@pytest.mark.parametrize("decoding", [0, 1, 30, 256])
def test_steps_grow_to_the_limit_and_stay_below(decoding):
    token_budget = TokenBudget(20.0, max_tokens=4096)
    lengths = run(token_budget, 40, decoding)
    assert max(lengths) <= 0.020
    assert lengths[-1] > 0.010, "a chunk twice as large would have been too long"


def test_prompts_go_on_however_short_the_limit():
    assert TokenBudget(0.001, max_tokens=4096).tokens(64) == 16
    assert TokenBudget(50.0, max_tokens=8).tokens(0) == 8


@pytest.mark.parametrize(
    ("most", "decoding", "tokens"),
    [(4096, 100, 3996), (4096, 4090, 16), (32, 20, 16), (16, 1, 15), (16, 12, 8), (2, 1, 1), (2, 2, 1)],
)
def test_chunks_of_mixed_steps_leave_room_for_running_rows(most: int, decoding: int, tokens: int) -> None:
    """As long as prompts go on; also where little fits into a step."""
    assert TokenBudget(None, most, mixed=True).tokens(decoding) == tokens


def test_one_odd_step_does_not_forbid_a_size_for_ever(seed):
    token_budget = TokenBudget(20.0, max_tokens=4096)
    before = run(token_budget, 40, 8)[-1]
    token_budget.ran(8, 1024, 5.0)
    assert run(token_budget, 1, 8)[0] < before
    assert run(token_budget, 800, 8)[-1] == pytest.approx(before)


def test_a_device_that_becomes_slower_is_followed(seed):
    token_budget = TokenBudget(20.0, max_tokens=4096)
    run(token_budget, 40, 8)
    assert run(token_budget, 40, 8, per_token=8e-5)[-1] <= 0.020


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "max_step_ms" in record.getMessage()]


def test_a_limit_below_the_smallest_steps_is_told_once_with_the_least(caplog: pytest.LogCaptureFixture) -> None:
    token_budget = TokenBudget(2.5, max_tokens=4096)
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
    least = TokenBudget(4.2, max_tokens=4096)
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


def test_a_limit_keeps_no_step_from_being_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of the repeated ones are timed."""
    let_a_cpu_capture(monkeypatch)
    monkeypatch.setattr(Loop, "asynchronous", True)
    model, params = uncompiled(monkeypatch), compiled_llm.SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    launched: list[int] = []
    for limit in (None, 1000.0):
        launches = note_calls(monkeypatch, Loop, "_launch", lambda *_: None)
        learnt = note_calls(monkeypatch, TokenBudget, "ran", lambda _, decoding, tokens, *__: (decoding, tokens))
        with compiled_llm.Engine(model, max_step_ms=limit, watch_model=False) as engine:
            engine.generate([[3, 4, 5], [6, 7, 8, 9]], params)
            launches.clear()
            learnt.clear()
            engine.generate([[3, 4, 5], [6, 7, 8, 9]], params)
        launched.append(len(launches))
    assert launched[0] == launched[1] < 30
    assert (0, 7) in learnt
    assert 3 <= learnt.count((2, 0)) <= 10


def test_warmup_prepares_all_sizes(seed):
    model = wrapped(4000, max_batch_size=2)
    with compiled_llm.Engine(model, max_num_seqs=20) as engine:
        engine.warmup()
        assert model.compiled.stats().buckets == [1, 2, 4, 8, 16, 20]
        with pytest.raises(ValueError, match="rows: 21 is not a whole number between 1 and max_num_seqs=20"):
            engine.warmup([21])
