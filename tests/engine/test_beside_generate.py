"""Calls of ``generate`` beside an engine that stops: those in progress end first, and none waits for it."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_llm.engine.engine import Engine
from compiled_llm.engine.steps.request import Request
from compiled_llm.engine.steps.scheduler import Scheduler
from compiled_llm.execution.threads import calls as calls_of_a_model
from compiled_llm.execution.threads.calls import Calls
from compiled_llm.huggingface.forward import forward
from support.engine.tiny_engines import PATIENCE, greedy, huggingfaces, tiny, wrapped
from support.in_threads import start
from support.parity import alone, assert_account_is_empty

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT, OTHER = [5, 6, 7, 8, 9], [9, 10, 11]
SHORT, LONG = 64, 256


@pytest.fixture
def model(reading: None) -> Any:
    """With 300 pages."""
    return wrapped(1200)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("new")
    tiny(1).save_pretrained(path)
    return path


@pytest.fixture
def engine(model: Any, engine: Engine) -> Iterator[Engine]:
    yield engine
    if engine.asleep:
        engine.wake()
    model.compiled.model_runner()


class Streamer:
    """Calls something once, in the midst of an answer."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.found: Any = None
        self._call, self._count = call, 0

    def put(self, _: Any) -> None:
        self._count += 1
        if self._count == 4:
            self.begun.set()
            assert self.go_on.wait(PATIENCE)
            self.found = self._call()

    def end(self) -> None: ...


def joined(model: Any, engine: Engine, tokens: int = SHORT) -> Any:
    """A call in progress in the engine's batch, beside a request of its own."""
    beside = engine.submit(OTHER, greedy(LONG))
    next(iter(beside))
    before = len(engine._engine_thread.request_table)
    call = start(lambda: alone(model, PROMPT, tokens))
    while len(engine._engine_thread.request_table) == before:
        assert not call.done()
    return beside, call


# ---- a call in the engine's batch


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize(
    ("stop", "requests"),
    [("update", "end"), ("update", "wait"), ("update", "keep"), ("sleep", "park"), ("sleep", "end")],
)
def test_a_call_in_the_batch_ends_before_the_engine_stops(model, engine, folder, stop, requests):
    beside, call = joined(model, engine)
    if stop == "update":
        engine.update_weights(folder, requests=requests)
        assert beside.done == (requests != "keep")
    else:
        engine.sleep(requests=requests)
        assert not model.compiled.calls._running
    assert call.result(PATIENCE) == huggingfaces(PROMPT, SHORT)
    assert alone(model, PROMPT, 9) == huggingfaces(PROMPT, 9, seed=int(stop == "update"))
    if stop == "sleep":
        engine.wake()
        assert beside.result(PATIENCE).finish_reason == ("cancelled" if requests == "end" else "length")
    beside.cancel()


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("rows", [1, 256])
def test_calls_go_on_inside_a_pause(model, rows):
    """With one row, which is taken for long, a call that waits in the batch leaves it."""
    with Engine(model, max_num_seqs=rows) as engine:
        beside, call = joined(model, engine)
        with engine.paused(weights_stay=True):
            assert call.result(PATIENCE) == huggingfaces(PROMPT, SHORT)
            assert start(lambda: alone(model, OTHER, 30)).result(PATIENCE) == huggingfaces(OTHER, 30)
            assert not beside.done
        assert beside.result(PATIENCE).token_ids == huggingfaces(OTHER, LONG)
    assert_account_is_empty(model)


def test_a_sampled_call_that_leaves_goes_on_with_its_seeds(model):
    settings: dict[str, Any] = {"do_sample": True, "max_new_tokens": 40, "attention_mask": torch.ones(1, 5).long()}

    def sampled() -> list[int]:
        torch.manual_seed(3)
        return model.generate(torch.tensor([PROMPT]), **settings)[0].tolist()  # type: ignore[no-any-return]

    expected = sampled()
    with Engine(model, max_num_seqs=1) as engine:
        beside = engine.submit(OTHER, greedy(LONG))
        next(iter(beside))
        call = start(sampled)
        while len(engine._engine_thread.request_table) == 1:
            assert not call.done()
        engine.close()
        assert call.result(PATIENCE) == expected
    assert beside.result(PATIENCE).finish_reason == "cancelled"
    assert model.compiled.stats().generate_calls == {"fast loop": 2}


def test_a_call_that_is_refused_its_pages_says_so(model, engine):
    """It would wait in the engine for pages of a cache that the thread which calls sleep keeps."""
    kept = model.compiled.new_cache()
    with torch.no_grad():
        model(torch.tensor([PROMPT * 150]), past_key_values=kept)  # 188 of 300 pages
    beside, call = joined(model, engine, tokens=900)
    with pytest.raises(RuntimeError, match="caches hold 188 pages"):
        engine.sleep(requests="end")
    with pytest.raises(ValueError, match="pages of 4 tokens"):
        call.result(PATIENCE)
    kept.close()
    assert beside.result(PATIENCE).token_ids == huggingfaces(OTHER, LONG)


# ---- a call with a streamer


def calls_of(model: Any, engine: Engine) -> dict[str, Callable[[], Any]]:
    def forward() -> Any:
        with torch.no_grad():
            return int(model(torch.tensor([OTHER]), use_cache=False).logits[0, -1].argmax())

    return {
        "generate": lambda: alone(model, OTHER, 3)[0],
        "generate in another thread": lambda: start(lambda: alone(model, OTHER, 3)).result(PATIENCE)[0],
        "forward": forward,
        "submit": lambda: engine.submit(OTHER, greedy(3)).result(PATIENCE).token_ids[0],
        "engine.generate": lambda: engine.generate(OTHER, greedy(3))[0].token_ids[0],
    }


STOPS = ("update", "update and end", "sleep", "close", "pause")
CALLS = ("generate", "generate in another thread", "forward", "submit", "engine.generate")
MEETINGS = [
    pytest.param(name, stop, busy, marks=pytest.mark.whole if busy and name not in ("generate", "submit") else ())
    for name, stop, busy in itertools.product(CALLS, STOPS, (False, True))
    if not (stop in ("close", "pause") and name in ("submit", "engine.generate"))  # which end with the engine, or wait
]


@pytest.mark.drawn
@pytest.mark.parametrize(("name", "stop", "busy"), MEETINGS)
def test_a_streamer_calls_the_model_while_another_thread_stops_it(model, engine, folder, name, stop, busy):
    beside = engine.submit(PROMPT, greedy(60)) if busy else None
    streamer = Streamer(calls_of(model, engine)[name])
    call = start(lambda: alone(model, PROMPT, 20, streamer=streamer))
    assert streamer.begun.wait(PATIENCE)
    over = threading.Event()

    def pause() -> None:
        with engine.paused():
            assert over.wait(PATIENCE)

    stops = {
        "update": lambda: engine.update_weights(folder),
        "update and end": lambda: engine.update_weights(folder, requests="end"),
        "sleep": engine.sleep,
        "close": engine.close,
        "pause": pause,
    }
    stopping = start(stops[stop])  # type: ignore[arg-type]
    calls = model.compiled.calls
    while stop in ("update", "update and end", "sleep") and not calls.awaited:
        assert not stopping.done()
    streamer.go_on.set()
    assert call.result(PATIENCE) == huggingfaces(PROMPT, 20)
    assert streamer.found == huggingfaces(OTHER, 1)[0]
    over.set()
    stopping.result(PATIENCE)
    if stop == "sleep":
        engine.wake()
    assert beside is None or beside.result(PATIENCE).finish_reason in ("length", "cancelled")


def test_a_call_between_its_beginning_and_its_loop_ends_first(model, engine, monkeypatch):
    """It has a cache already, in pages that sleep would give back."""
    alone(model, PROMPT, 1)
    begun, go_on, original = threading.Event(), threading.Event(), type(model)._sample

    def sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        begun.set()
        assert go_on.wait(PATIENCE)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "_sample", sample)
    call = start(lambda: alone(model, PROMPT, 9))
    assert begun.wait(PATIENCE)
    sleeping = start(engine.sleep)
    while not model.compiled.calls.awaited:
        assert not sleeping.done()
    late = start(lambda: alone(model, OTHER, 9))
    go_on.set()
    assert call.result(PATIENCE) == huggingfaces(PROMPT, 9)
    assert late.result(PATIENCE) == huggingfaces(OTHER, 9)
    sleeping.result(PATIENCE)


@pytest.mark.whole
def test_a_callback_waits_for_anothers_call_while_the_engine_is_busy(model, engine, folder):
    """Steps of an engine do not bring a call on that waits."""
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            engine.submit(PROMPT, greedy(20)).result(PATIENCE)

    crowd = [start(ask) for _ in range(2)]
    streamer = Streamer(lambda: start(lambda: alone(model, OTHER, 3)).result(PATIENCE))
    call = start(lambda: alone(model, PROMPT, 20, streamer=streamer))
    assert streamer.begun.wait(PATIENCE)
    updating = start(lambda: engine.update_weights(folder))
    while not model.compiled.calls.awaited:
        assert not updating.done()
    streamer.go_on.set()
    try:
        assert call.result(PATIENCE) == huggingfaces(PROMPT, 20)
        updating.result(PATIENCE)
    finally:
        over.set()
    for each in crowd:
        each.result(PATIENCE)
    assert streamer.found == huggingfaces(OTHER, 3)


# ---- calls in progress


def _interrupted(calls: Calls) -> None:
    """Wait to begin, and be interrupted."""
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(calls, "_wait_for_turn", _interrupt)
        with calls.begun():
            pass
    time.sleep(0.1)


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_calls_wait_for_those_that_wait_for_others_unless_nothing_moves(monkeypatch):
    calls = Calls()
    first, go_on, order = threading.Event(), threading.Event(), list[str]()

    def call(name: str, wait: threading.Event | None = None) -> None:
        with calls.begun():
            order.append(name)
            first.set()
            with calls.begun():  # one inside of it
                assert wait is None or wait.wait(PATIENCE)

    early = start(lambda: call("early", go_on))
    assert first.wait(PATIENCE)

    def stop() -> None:
        with calls.waiting():
            calls.wait()
            with calls.barred() as barred:
                assert barred
                order.append("stopped")

    stopping = start(stop)
    while not calls.awaited:
        pass
    late = start(lambda: call("late"))
    monkeypatch.setattr(calls_of_a_model, "_STALLED", 0.3)
    for _ in range(5):
        calls.moves += 1
        threading.Event().wait(0.1)
    assert order == ["early"]
    over = time.monotonic() + PATIENCE
    while not late.done() and time.monotonic() < over:
        _interrupted(calls)  # what ends before it begins moves nothing
    late.result(1)
    go_on.set()
    for future in (early, stopping):
        future.result(PATIENCE)
    assert order == ["early", "late", "stopped"]
    assert not calls.here
    with calls.begun(), calls.barred() as barred:
        assert calls.here
        assert not barred


@pytest.mark.parametrize("keeps_cache", [False, True])
def test_a_forward_that_has_found_the_model_awake_ends_before_it_sleeps(
    engine: Engine, model: Any, monkeypatch: pytest.MonkeyPatch, keeps_cache: bool
) -> None:
    fitting, sleeping = forward.fitting, list[Future[int]]()

    def looked(*arguments: Any) -> Any:
        found = fitting(*arguments)
        sleeping.append(start(engine.sleep))
        wait(sleeping, timeout=0.2)
        return found

    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        embeddings = model.get_input_embeddings()(ids)  # they take pages
        expected = model(inputs_embeds=embeddings, use_cache=False).logits
        monkeypatch.setattr(forward, "fitting", looked)
        output = model(inputs_embeds=embeddings, use_cache=keeps_cache)
    assert output.logits.equal(expected)
    if keeps_cache:
        with pytest.raises(RuntimeError, match="caches hold"):
            sleeping[0].result(PATIENCE)
        output.past_key_values.close()
    else:
        sleeping[0].result(PATIENCE)
        engine.wake()
    assert_account_is_empty(model)


def test_a_request_is_not_forgotten_that_another_thread_takes_up_and_leaves(engine, monkeypatch):
    """The engine's thread looks for work while a thread that is about to leave hands the only request over."""
    engine.submit(PROMPT, greedy(1)).result(PATIENCE)  # from now on there is a thread
    add_all = Scheduler.add_all

    def slowly(scheduler: Scheduler, requests: Sequence[Request]) -> None:
        time.sleep(0.5)
        add_all(scheduler, requests)

    def pause() -> None:
        with engine.paused():
            pass

    with engine.paused():
        monkeypatch.setattr(Scheduler, "add_all", slowly)
        handle = engine.submit(PROMPT, greedy(4))
        pausing = start(pause)
        time.sleep(0.3)
    pausing.result(PATIENCE)
    assert len(handle.result(PATIENCE).outputs[0].token_ids) == 4
