"""An engine and calls of ``generate`` share pages, turns and device memory; neither fails nor starves for the other."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from transformers import PreTrainedModel

import compiled_llm
from compiled_llm.engine.engine import Engine, QueueFullError
from compiled_llm.engine.steps.loop import Loop
from compiled_llm.engine.thread.arrivals import Arrivals
from compiled_llm.engine.thread.engine_thread import EngineThread
from compiled_llm.execution.lifecycle import runner_lifecycle
from compiled_llm.requests.sampling_params import SamplingParams
from support.in_threads import in_thread, start
from support.parity import alone, assert_account_is_empty
from support.tiny_models import tiny_qwen3

PROMPT = list(range(3, 23))
PATIENCE = 60


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


def tiny() -> PreTrainedModel:
    return tiny_qwen3(eos_token_id=None, num_hidden_layers=1)


@pytest.fixture(scope="module")
def plain() -> PreTrainedModel:
    return tiny()


@pytest.fixture
def model() -> PreTrainedModel:
    """With 40 pages."""
    options: dict[str, Any] = {"mode": "eager", "max_batch_size": 4, "page_size": 4, "progress": False}
    return compiled_llm.wrap(tiny(), kv_memory="160 tokens", **options)


@pytest.fixture
def engine(model: PreTrainedModel, one_thread: None) -> Iterator[Engine]:
    with Engine(model) as engine:
        yield engine
    assert_account_is_empty(model)


def by_itself(model: PreTrainedModel, prompt: list[int], new: int) -> list[int]:
    """In a loop that joins no engine."""
    return alone(model, prompt, new, stopping_criteria=[lambda ids, scores: torch.zeros(len(ids), dtype=torch.bool)])


# ---- pages


def test_a_call_beside_a_paused_engine_takes_its_pages(plain, model, engine):
    handle = engine.submit(PROMPT, greedy(100))
    next(iter(handle))
    with engine.paused(weights_stay=True):
        assert model.compiled.stats().pages.used > 0
        assert by_itself(model, PROMPT, 120) == alone(plain, PROMPT, 120)  # 35 of 40 pages
        assert in_thread(lambda: by_itself(model, PROMPT[:9], 120)) == alone(plain, PROMPT[:9], 120)
    assert handle.result(timeout=PATIENCE).token_ids == alone(plain, PROMPT, 100)
    assert engine.stats().preemptions == 1


def test_a_call_while_the_loop_passes_between_threads_takes_its_pages(plain, model, engine, monkeypatch):
    monkeypatch.setattr(EngineThread, "start_thread", lambda self: None)
    handle = engine.submit(PROMPT, greedy(100))
    engine._engine_thread.run(lambda: handle.requests[0].tokens)  # and now nobody runs it
    assert by_itself(model, PROMPT, 120) == alone(plain, PROMPT, 120)
    engine._engine_thread.run(lambda: handle.done)
    assert handle.output().token_ids == alone(plain, PROMPT, 100)


def test_a_call_that_never_fits_takes_nobodys_pages(model, engine):
    handle = engine.submit(PROMPT, greedy(100))
    next(iter(handle))
    with engine.paused(weights_stay=True), pytest.raises(ValueError, match="pages of 4 tokens"):
        by_itself(model, PROMPT, 225)
    assert handle.result(timeout=PATIENCE).finish_reason == "length"
    assert engine.stats().preemptions == 0


# ---- turns


def crowd(call: Callable[[], Any], over: threading.Event) -> list[Any]:
    """Threads that call again and again until it is over."""

    def again() -> int:
        count = 0
        while not over.is_set():
            call()
            count += 1
        return count

    return [start(again) for _ in range(3)]


def test_calls_that_always_wait_for_pages_do_not_starve_the_engine(plain, model, engine):
    over = threading.Event()
    callers = crowd(lambda: by_itself(model, PROMPT, 85), over)  # 26 of 40 pages: one at a time
    try:
        time.sleep(0.1)
        for _ in range(2):
            handle = engine.submit(PROMPT, greedy(72))  # 23 pages
            assert handle.result(timeout=PATIENCE).token_ids == alone(plain, PROMPT, 72)
    finally:
        over.set()
        counts = [caller.result(timeout=PATIENCE) for caller in callers]
    assert sum(counts) < 20, "it has waited for many that came later"


def test_small_calls_do_not_starve_one_that_needs_many_pages(plain, model, engine):
    over = threading.Event()
    callers = crowd(lambda: by_itself(model, PROMPT, 24), over)  # 11 pages: three at a time
    try:
        time.sleep(0.1)
        assert start(lambda: by_itself(model, PROMPT, 120)).result(timeout=PATIENCE) == alone(plain, PROMPT, 120)
        assert engine.submit(PROMPT, greedy(120)).result(timeout=PATIENCE).token_ids == alone(plain, PROMPT, 120)
    finally:
        over.set()
        counts = [caller.result(timeout=PATIENCE) for caller in callers]
    assert sum(counts) < 40, "it has waited for many that came later"


def test_a_full_engine_does_not_starve_a_call(plain, model, engine):
    over = threading.Event()
    callers = crowd(lambda: engine.submit(PROMPT, greedy(24)).result(timeout=PATIENCE), over)
    try:
        time.sleep(0.1)
        assert start(lambda: by_itself(model, PROMPT, 120)).result(timeout=PATIENCE) == alone(plain, PROMPT, 120)
    finally:
        over.set()
        counts = [caller.result(timeout=PATIENCE) for caller in callers]
    assert sum(counts) < 20, "it has waited for many that came later"


def test_who_waits_for_nobody_passes_when_nothing_moves(plain, model, engine):
    """A callback waits for a call that came after one that waits for the callback's pages."""
    waiting, expected = [], alone(plain, PROMPT[:9], 20)

    def wait_for_another(ids: Any, scores: Any) -> Any:
        if not waiting:
            waiting.append(start(lambda: by_itself(model, PROMPT, 120)))
            while not model.compiled.loop_lock.wanted:
                time.sleep(0.01)
            assert in_thread(lambda: by_itself(model, PROMPT[:9], 20)) == expected
            assert engine.submit(PROMPT[:9], greedy(20)).result(timeout=PATIENCE).token_ids == expected
        return torch.zeros(len(ids), dtype=torch.bool)

    assert alone(model, PROMPT, 60, stopping_criteria=[wait_for_another]) == alone(plain, PROMPT, 60)
    assert waiting[0].result(timeout=PATIENCE) == alone(plain, PROMPT, 120)


def test_a_listener_that_calls_the_model_is_refused(plain, model, engine):
    errors = []

    def call() -> None:
        try:
            alone(model, PROMPT, 2)
        except RuntimeError as error:
            errors.append(str(error))

    with engine.paused():
        handle = engine.submit(PROMPT, greedy(2))
        handle.when_changed(call)
    assert handle.result(timeout=PATIENCE).token_ids == alone(plain, PROMPT, 2)
    assert "in this thread" in errors[0]


# ---- the queue


def test_no_race_of_submitters_passes_max_queue(model, one_thread, monkeypatch):
    slow = EngineThread.waiting.fget

    def waiting(self: EngineThread) -> Any:
        count = slow(self)  # type: ignore[misc]
        time.sleep(0.02)
        return count

    with Engine(model, max_rows=1, max_queue=3) as engine:
        engine.generate(PROMPT, greedy(1))
        with engine.paused():
            monkeypatch.setattr(EngineThread, "waiting", property(waiting))
            calls = [start(lambda: engine.submit(PROMPT, greedy(2))) for _ in range(6)]
            refused = [call for call in calls if isinstance(call.exception(timeout=PATIENCE), QueueFullError)]
            assert len(refused) == 3
            assert len(engine._engine_thread.request_table) == 3


def test_whoever_serves_is_called_even_if_another_has_taken_the_message():
    """That one leaves when its own answers have ended, and the request is served by nobody."""
    arrivals, taken = Arrivals(), []
    arrivals.send(taken.append)
    arrivals.deliver(cast(Loop, None))
    assert taken
    assert start(arrivals.wait).result(timeout=PATIENCE)


# ---- device memory


@pytest.mark.parametrize("asked", ["model", "engine"])
def test_an_engine_lets_an_old_device_side_go_before_a_new_one_is_made(model, engine, monkeypatch, asked):
    engine.generate(PROMPT, greedy(2))
    old, made = weakref.ref(model.compiled.model_runner()), []
    original = runner_lifecycle.ModelRunner

    def new(*args: Any, **kwargs: Any) -> Any:
        made.append(old() is None)
        return original(*args, **kwargs)

    monkeypatch.setattr(runner_lifecycle, "ModelRunner", new)
    model.to(torch.float64)
    if asked == "model":
        alone(model, PROMPT, 2)
    else:
        engine.generate(PROMPT, greedy(2))
    assert made == [True]
    assert engine.stats().finished == 1 + (asked == "engine")


def test_requests_of_a_model_that_was_moved_end_and_its_old_device_side_goes_first(model, engine, monkeypatch):
    handle = engine.submit(PROMPT, greedy(120))
    next(iter(handle))
    old, made = weakref.ref(model.compiled.model_runner()), []
    original = runner_lifecycle.ModelRunner

    def new(*args: Any, **kwargs: Any) -> Any:
        made.append(old() is None)
        return original(*args, **kwargs)

    monkeypatch.setattr(runner_lifecycle, "ModelRunner", new)
    with engine.paused():
        model.to(torch.float64)
    with pytest.raises(RuntimeError, match="moved or converted while requests were running"):
        handle.result(timeout=PATIENCE)
    engine.generate(PROMPT, greedy(2))
    assert made == [True]


def test_a_closed_engine_holds_no_device_memory(model, one_thread):
    with Engine(model) as engine:
        engine.generate(PROMPT, greedy(2))
        model_runner = weakref.ref(model.compiled.model_runner())
    assert (engine.stats().finished, engine.stats().new_tokens) == (1, 2)
    model.compiled.runner_lifecycle.present = None
    assert model_runner() is None
