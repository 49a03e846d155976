"""An engine and calls of ``generate`` share pages, turns and device memory; neither fails nor starves for the other."""

from __future__ import annotations

import threading
import time
import weakref
from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch
from transformers import PreTrainedModel

from compiled_llm.engine.engine import Engine, QueueFullError
from compiled_llm.engine.steps.loop import Loop
from compiled_llm.engine.thread.arrivals import Arrivals
from compiled_llm.engine.thread.engine_thread import EngineThread
from compiled_llm.execution.lifecycle import runner_lifecycle
from support.engine.tiny_engines import PATIENCE, greedy, huggingfaces, wrapped
from support.in_threads import in_thread, start
from support.parity import alone

PROMPT = list(range(3, 23))


@pytest.fixture
def model() -> PreTrainedModel:
    """With 40 pages."""
    return wrapped(160)


def by_itself(model: PreTrainedModel, prompt: list[int], new: int) -> list[int]:
    """In a loop that joins no engine."""
    return alone(model, prompt, new, stopping_criteria=[lambda ids, scores: torch.zeros(len(ids), dtype=torch.bool)])


# ---- pages


@pytest.mark.whole
def test_a_call_beside_a_paused_engine_takes_its_pages(model, engine):
    handle = engine.submit(PROMPT, greedy(100))
    next(iter(handle))
    with engine.paused(weights_stay=True):
        assert model.compiled.stats().pages.used > 0
        assert by_itself(model, PROMPT, 120) == huggingfaces(PROMPT, 120)  # 35 of 40 pages
        assert in_thread(lambda: by_itself(model, PROMPT[:9], 120)) == huggingfaces(PROMPT[:9], 120)
    assert handle.result(timeout=PATIENCE).token_ids == huggingfaces(PROMPT, 100)
    assert engine.stats().preemptions == 1


def test_a_call_while_the_loop_passes_between_threads_takes_its_pages(model, engine, monkeypatch):
    monkeypatch.setattr(EngineThread, "start_thread", lambda self: None)
    handle = engine.submit(PROMPT, greedy(100))
    handle.when_changed(engine._engine_thread._arrivals.call)
    engine._engine_thread.run(lambda: handle.requests[0].tokens)  # and now no thread runs it
    assert by_itself(model, PROMPT, 120) == huggingfaces(PROMPT, 120)
    engine._engine_thread.run(lambda: handle.done)
    assert handle.output().token_ids == huggingfaces(PROMPT, 100)


def test_a_call_that_never_fits_takes_no_pages(model, engine):
    handle = engine.submit(PROMPT, greedy(100))
    next(iter(handle))
    with pytest.raises(ValueError, match="pages of 4 tokens"):
        by_itself(model, PROMPT, 225)
    assert not handle.done, "it has waited for pages"
    with engine.paused(weights_stay=True), pytest.raises(ValueError, match="pages of 4 tokens"):
        by_itself(model, PROMPT, 225)
    assert handle.result(timeout=PATIENCE).finish_reason == "length"
    assert engine.stats().preemptions == 0


# ---- turns


SMALL, LARGE = 24, 120
"""Tokens of which three answers fit at a time, and of which one does, alone."""
BY_ITSELF: Any = lambda model, engine, tokens: by_itself(model, PROMPT, tokens)  # noqa: E731
IN_ENGINE: Any = lambda model, engine, tokens: engine.submit(PROMPT, greedy(tokens)).result(PATIENCE).token_ids  # noqa: E731


@pytest.mark.whole
@pytest.mark.parametrize(
    ("crowd", "size", "late", "most"),
    [
        (BY_ITSELF, 85, [IN_ENGINE, IN_ENGINE], 20),
        (BY_ITSELF, SMALL, [BY_ITSELF, IN_ENGINE], 40),
        (IN_ENGINE, SMALL, [BY_ITSELF], 20),
    ],
    ids=["calls starve no engine", "small calls starve no large one", "an engine starves no call"],
)
def test_requests_are_served_in_their_order(model, engine, crowd, size, late, most):
    """Threads ask again and again, until those have ended that came after them."""
    over, tokens, served = threading.Event(), 72 if size == 85 else LARGE, list[int]()

    def ask() -> None:
        while not over.is_set():
            crowd(model, engine, size)
            served.append(size)

    callers = [start(ask) for _ in range(3)]
    try:
        while len(served) < 3:
            time.sleep(0.01)
        before = len(served)
        for call in late:
            assert start(lambda call=call: call(model, engine, tokens)).result(PATIENCE) == huggingfaces(PROMPT, tokens)
    finally:
        over.set()
        for caller in callers:
            caller.result(timeout=PATIENCE)
    assert len(served) - before < most, "it has waited for many that came later"


@pytest.mark.whole
def test_a_call_that_waits_for_no_other_passes_when_nothing_moves(model, engine):
    """A callback waits for a call that came after one that waits for the callback's pages."""
    waiting, expected = [], huggingfaces(PROMPT[:9], 20)

    def wait_for_another(ids: Any, scores: Any) -> Any:
        if not waiting:
            waiting.append(start(lambda: by_itself(model, PROMPT, 120)))
            while not model.compiled.loop_lock.waiters:
                time.sleep(0.01)
            assert in_thread(lambda: by_itself(model, PROMPT[:9], 20)) == expected
            assert engine.submit(PROMPT[:9], greedy(20)).result(timeout=PATIENCE).token_ids == expected
        return torch.zeros(len(ids), dtype=torch.bool)

    assert alone(model, PROMPT, 60, stopping_criteria=[wait_for_another]) == huggingfaces(PROMPT, 60)
    assert waiting[0].result(timeout=PATIENCE) == huggingfaces(PROMPT, 120)


def test_a_listener_that_calls_the_model_is_refused(model, engine):
    errors = []

    def call() -> None:
        try:
            alone(model, PROMPT, 2)
        except RuntimeError as error:
            errors.append(str(error))

    with engine.paused():
        handle = engine.submit(PROMPT, greedy(2))
        handle.when_changed(call)
    assert handle.result(timeout=PATIENCE).token_ids == huggingfaces(PROMPT, 2)
    assert "in this thread" in errors[0]


# ---- the queue


def test_no_race_of_submitters_passes_max_queue(model, one_thread, monkeypatch):
    slow = EngineThread.waiting.fget

    def waiting(self: EngineThread) -> Any:
        count = slow(self)  # type: ignore[misc]
        time.sleep(0.02)
        return count

    with Engine(model, max_num_seqs=1, max_queue=3) as engine:
        engine.generate(PROMPT, greedy(1))
        with engine.paused():
            monkeypatch.setattr(EngineThread, "waiting", property(waiting))
            calls = [start(lambda: engine.submit(PROMPT, greedy(2))) for _ in range(6)]
            refused = [call for call in calls if isinstance(call.exception(timeout=PATIENCE), QueueFullError)]
            assert len(refused) == 3
            assert len(engine._engine_thread.request_table) == 3


def test_the_serving_thread_wakes_even_if_another_has_taken_the_message():
    """That one leaves when its own answers have ended, and no thread would serve the request."""
    arrivals, taken = Arrivals(), []
    arrivals.send(taken.append)
    arrivals.deliver(cast(Loop, None))
    assert taken
    assert start(arrivals.wait).result(timeout=PATIENCE)


# ---- device memory


def made_from_now_on(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each new model runner, whether the present one has gone by then."""
    old, made = weakref.ref(model.compiled.model_runner()), list[bool]()
    original = runner_lifecycle.ModelRunner

    def new(*args: Any, **kwargs: Any) -> Any:
        made.append(old() is None)
        return original(*args, **kwargs)

    monkeypatch.setattr(runner_lifecycle, "ModelRunner", new)
    return made


@pytest.mark.parametrize("asked", ["model", "engine", "engine that runs"])
def test_an_engine_lets_an_old_model_runner_go_before_a_new_one_is_made(model, engine, monkeypatch, asked):
    engine.generate(PROMPT, greedy(2))
    handle = engine.submit(PROMPT, greedy(120)) if asked == "engine that runs" else None
    if handle is not None:
        next(iter(handle))
    made = made_from_now_on(model, monkeypatch)
    with engine.paused() if handle is not None else nullcontext():
        model.to(torch.float64)
    if handle is not None:
        with pytest.raises(RuntimeError, match="moved or converted while requests were running"):
            handle.result(timeout=PATIENCE)
    if asked == "model":
        alone(model, PROMPT, 2)
    else:
        engine.generate(PROMPT, greedy(2))
    assert made == [True]
    assert engine.stats().finished == 1 + (asked != "model") + (handle is not None)


def test_a_closed_engine_holds_no_device_memory(model, one_thread):
    with Engine(model) as engine:
        engine.generate(PROMPT, greedy(2))
        model_runner = weakref.ref(model.compiled.model_runner())
    assert (engine.stats().finished, engine.stats().new_tokens) == (1, 2)
    model.compiled.runner_lifecycle.present = None
    assert model_runner() is None
