"""Any error of a request's own code ends that request: no thread of the engine's, and no other request."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import Tensor
from transformers import PreTrainedModel

from compiled_llm.engine.engine import Engine
from compiled_llm.engine.steps.request import RequestError
from compiled_llm.engine.thread.output_processor import OutputProcessor, _Work
from compiled_llm.requests.handle import RequestHandle
from support.engine.text_tokenizers import Numbers
from support.engine.tiny_engines import PATIENCE, greedy, huggingfaces
from support.execution.failing_calls import fail_once
from support.in_threads import start
from support.parity import assert_account_is_empty

pytestmark = pytest.mark.usefixtures("one_thread", "reading")

PROMPT, OTHER = [5, 6, 7, 8, 9], [9, 10, 11]


class PanicException(BaseException):
    """As libraries in Rust raise: no ``Exception``."""


ERRORS = [SystemExit, asyncio.CancelledError, PanicException, GeneratorExit, KeyboardInterrupt]
"""KeyboardInterrupt is Ctrl-C in the main thread alone; elsewhere it is an error like the others."""


@pytest.fixture
def tokenizer() -> Numbers:
    return Numbers()


@pytest.fixture
def engine(model: PreTrainedModel, tokenizer: Numbers, request: pytest.FixtureRequest) -> Iterator[Engine]:
    max_num_seqs = 1 if "place" in request.fixturenames else 256  # there the second request waits
    with Engine(model, tokenizer=tokenizer, max_num_seqs=max_num_seqs) as engine:
        yield engine
    assert_account_is_empty(model)


def failing(error: type[BaseException], after: int) -> Any:
    def processor(answer: list[int], logits: Tensor) -> Tensor:
        if len(answer) == after:
            raise error("planted")
        return logits

    return processor


def assert_it_goes_on(engine: Engine) -> None:
    assert engine.submit(OTHER, greedy(5)).result(PATIENCE).token_ids == huggingfaces(OTHER, 5)
    assert start(lambda: engine.generate(OTHER, greedy(5))).result(PATIENCE)[0].token_ids == huggingfaces(OTHER, 5)
    assert engine.stats().running == engine.stats().waiting == 0


# ---- a request's own code


@pytest.mark.drawn
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("after", [0, 3])
def test_a_processor_ends_its_request(engine, error, after):
    params = greedy(9, logits_processors=[failing(error, after)])
    if error is not KeyboardInterrupt:  # which would be the caller's, in whose thread the processor runs
        outputs = engine.generate([PROMPT, OTHER], [params, greedy(9)])
        assert [output.finish_reason for output in outputs] == ["error", "length"]
    with engine.paused():
        beside, bad = engine.submit(OTHER, greedy(9)), engine.submit(PROMPT, params)
    with pytest.raises(RequestError, match=f"processor has failed: {error.__name__}: planted"):
        bad.result(PATIENCE)
    assert len(bad.output().token_ids) == after
    assert beside.result(PATIENCE).token_ids == huggingfaces(OTHER, 9)
    assert_it_goes_on(engine)


@pytest.mark.drawn
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("as_text", [False, True])
def test_a_listener_hears_no_more_and_others_do(engine, caplog, error, as_text):
    heard: list[int] = []

    def fail() -> None:
        raise error("planted")

    with engine.paused():
        handle = engine.submit(PROMPT, greedy(6))
        text = handle.text() if as_text else None
        handle.when_changed(fail)
        handle.when_changed(lambda: heard.append(1))
    assert handle.result(PATIENCE).token_ids == huggingfaces(PROMPT, 6)
    assert text is None or len("".join(text).split()) == 6
    assert heard
    assert caplog.text.count(f"a listener has failed, and hears no more: {error.__name__}: planted") == 1
    assert_it_goes_on(engine)


@pytest.mark.drawn
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("stop", [None, "never"])
def test_a_tokenizer_ends_the_request_whose_tokens_it_fails_on(engine, tokenizer, error, stop):
    tokens = huggingfaces(PROMPT, 6)
    tokenizer.fails_on, tokenizer.error = frozenset([tokens[3]]), error
    with engine.paused():
        handle, beside = (engine.submit(prompt, greedy(6, stop=stop)) for prompt in (PROMPT, [0, 1]))
        text, other = handle.text(), beside.text()
    with pytest.raises(RequestError, match=f"the tokenizer cannot decode the answer: {error.__name__}: planted"):
        "".join(text)
    with pytest.raises(RequestError):
        handle.result(PATIENCE)
    if error is not KeyboardInterrupt:  # which would be the caller's
        bad, good = engine.generate([PROMPT, [0, 1]], greedy(6))
        assert (bad.finish_reason, good.finish_reason) == ("error", "length")
        assert "the tokenizer cannot decode" in str(bad.error)
    assert "".join(other) == beside.result(PATIENCE).text
    assert len(str(beside.output().text).split()) == 6
    tokenizer.fails_on = frozenset()
    assert_it_goes_on(engine)


# ---- Ctrl-C


def test_ctrl_c_reaches_the_user_in_a_processor_that_does_not_end(engine):
    reached, over, waits = threading.Event(), threading.Event(), list[bool]()

    def endless(answer: list[int], logits: Tensor) -> Tensor:
        if len(answer) == 2:
            reached.set()
            waits.append(over.wait(PATIENCE))
        return logits

    beside = engine.submit(OTHER, greedy(128))
    next(iter(beside))
    start(lambda: reached.wait(PATIENCE) and os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPT, greedy(9, logits_processors=[endless]))
    assert not waits, "it has waited for the processor"
    over.set()
    assert beside.result(PATIENCE).token_ids == huggingfaces(OTHER, 128)
    assert_it_goes_on(engine)


def test_ctrl_c_in_a_listener_comes_once_the_others_were_told(engine):
    """Of the main thread; all others wait for what a listener is told but once."""
    engine._engine_thread.start_thread = lambda: None  # type: ignore[method-assign]
    told: list[int] = []

    def fail() -> None:
        raise KeyboardInterrupt

    handle = engine.submit(PROMPT, greedy(3))
    for number in range(8):
        handle.when_changed(lambda number=number: told.append(number))
    handle.when_changed(fail)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(OTHER, greedy(9))
    assert sorted(told) == list(range(8))
    handle.listeners.remove(fail)
    assert engine.generate(OTHER, greedy(9))[0].token_ids == huggingfaces(OTHER, 9)
    assert handle.result(PATIENCE).token_ids == huggingfaces(PROMPT, 3)


# ---- steps, and what is around them


@pytest.mark.drawn
@pytest.mark.parametrize("error", [SystemExit, PanicException, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["step", "drain", "rest", "free_leaks"])
def test_the_engines_thread_survives_what_fails_in_it(engine, monkeypatch, caplog, error, place):
    engine.submit(OTHER, greedy(1)).result(PATIENCE)
    with engine.paused():
        loop, thread = engine._engine_thread.loop, engine._engine_thread._serving.thread
        assert loop is not None is not thread
        handle, waiting = engine.submit(PROMPT, greedy(5)), engine.submit(OTHER, greedy(5))
        if place == "drain":
            fail_once(monkeypatch, loop, "step", RuntimeError("first"), after=3)
        fail_once(monkeypatch, loop, place, error("planted"), after=3 if place == "step" else 1)
    if place in ("rest", "free_leaks"):  # after the last token
        assert handle.result(PATIENCE).token_ids == huggingfaces(PROMPT, 5)
    else:
        with pytest.raises(RuntimeError, match=f"failed of {error.__name__}: planted" if place == "step" else "first"):
            handle.result(PATIENCE)
    assert waiting.result(PATIENCE).token_ids == huggingfaces(OTHER, 5)
    assert_it_goes_on(engine)
    assert "planted" in caplog.text or place == "drain"
    assert thread.is_alive()
    assert engine._engine_thread._serving.thread is thread


def test_an_error_that_is_thrown_into_a_callers_thread_reaches_that_caller(engine, monkeypatch):
    """As libraries do that end threads; what else ran is computed again."""
    engine._engine_thread.start_thread = lambda: None  # type: ignore[method-assign]
    engine.generate(OTHER, greedy(1))
    beside = engine.submit(OTHER, greedy(30))
    fail_once(monkeypatch, engine._engine_thread.loop, "step", SystemExit("planted"), after=4, once_done=True)
    with pytest.raises(SystemExit, match="planted"):
        start(lambda: engine.generate(PROMPT, greedy(20))).result(PATIENCE)
    assert engine.generate(PROMPT, greedy(20))[0].token_ids == huggingfaces(PROMPT, 20)
    assert start(lambda: engine.generate(PROMPT, greedy(40))).result(PATIENCE)
    assert beside.result(PATIENCE).token_ids == huggingfaces(OTHER, 30)


# ---- threads


def throw(thread: threading.Thread | None, error: type[BaseException]) -> None:
    assert thread is not None
    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(error))


def kill(thread: threading.Thread | None, wake: Callable[[], object]) -> None:
    """End a thread by an error out of nowhere; one that meets it in a step or a finalizer goes on, and gets another."""
    assert thread is not None
    ends = time.monotonic() + PATIENCE
    while thread.is_alive() and time.monotonic() < ends:
        throw(thread, SystemExit)
        wake()
        thread.join(0.5)
    assert not thread.is_alive()


@pytest.mark.parametrize("name", ["serve", "_run", "_turn"])
def test_requests_end_with_the_error_of_the_engines_thread(engine, monkeypatch, caplog, name):
    engine.submit(OTHER, greedy(1)).result(PATIENCE)
    fail_once(monkeypatch, engine._engine_thread, name, SystemExit("planted"), after=1)

    def ask_until_it_fails() -> None:
        for _ in range(100):  # the thread may still be at the end of what it called before
            engine.submit(PROMPT, greedy(5)).result(PATIENCE)
            time.sleep(0.05)

    with caplog.at_level(logging.ERROR), pytest.raises(RuntimeError, match="SystemExit: planted"):
        ask_until_it_fails()
    assert "SystemExit: planted" in caplog.text
    assert_it_goes_on(engine)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_thread_that_has_died_is_replaced(engine, monkeypatch):
    list(engine.submit(OTHER, greedy(1)).text())
    arrivals, output = engine._engine_thread._arrivals, engine._engine_thread.request_table.output

    def wake_text_thread() -> None:
        with output._work.changed:
            output._work.changed.notify_all()

    with monkeypatch.context() as patch:
        patch.setattr(type(engine._engine_thread), "fail", lambda self, error: {}["missing"])
        patch.setattr(OutputProcessor, "close", lambda self: None)
        patch.setattr("compiled_llm.engine.thread.output_processor._lose", lambda *_: {}["missing"])
        kill(engine._engine_thread._serving.thread, arrivals.call)
        kill(output._thread, wake_text_thread)
    assert_it_goes_on(engine)
    assert len("".join(engine.submit(PROMPT, greedy(4)).text()).split()) == 4


def test_texts_end_with_the_error_of_the_text_thread(engine, monkeypatch, caplog):
    handle = engine.submit(PROMPT, greedy(128))
    with monkeypatch.context() as patch:
        patch.setattr(RequestHandle, "read_text", lambda self: {}["missing"])
        text = iter(handle.text())
        with pytest.raises(RequestError, match="the thread that makes text has failed: KeyError: 'missing'"):
            next(text)
    assert handle.output().finish_reason == "error"
    assert "requests whose text is lost: 1" in caplog.text
    assert_it_goes_on(engine)
    assert len("".join(engine.submit(PROMPT, greedy(4)).text()).split()) == 4


def test_a_request_that_waits_again_while_its_text_is_made_is_lost_once():
    handle: Any = object()
    work = _Work()
    work.add([handle])
    assert work.take() == [handle]
    work.add([handle])
    assert work.take_all() == [handle]


def test_a_thread_that_ends_inside_a_pause_has_the_loop_no_more(engine):
    left: list[Any] = []

    def pause() -> None:
        left.append(engine.paused())
        left[0].__enter__()

    thread = threading.Thread(target=pause)
    thread.start()
    thread.join(PATIENCE)
    assert_it_goes_on(engine)
