"""Ctrl-C arrives promptly, and leaves nothing half done: pages, locks, threads and handlers are as before."""

from __future__ import annotations

import copy
import ctypes
import dis
import functools
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from types import FrameType
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import compiled_llm
from compiled_llm.execution.threads import device_thread
from compiled_llm.execution.threads.device_thread import DeviceThread
from compiled_llm.execution.threads.interrupts import _State, allowed, deferred
from compiled_llm.execution.threads.loop_lock import LoopLock
from support.execution.callbacks import Callback
from support.in_threads import PATIENCE, in_thread, start
from support.parity import assert_account_is_empty, greedy, mixed_prompts
from support.tiny_models import tiny_qwen3

pytestmark = pytest.mark.usefixtures("executor")

OPTIONS: dict[str, Any] = {"page_size": 4, "kv_memory": "4000 tokens", "max_batch_size": 8, "progress": False}


@pytest.fixture
def model() -> PreTrainedModel:
    return compiled_llm.wrap(tiny_qwen3(eos_token_id=None), mode="eager", **OPTIONS)


@pytest.fixture
def handler() -> Iterator[Any]:
    """The handler of Ctrl-C, which is put back afterwards."""
    before = signal.getsignal(signal.SIGINT)
    yield before
    signal.signal(signal.SIGINT, before)


def interrupt_after(seconds: float) -> threading.Timer:
    """Press Ctrl-C: the terminal's signal reaches the main thread."""
    timer = threading.Timer(seconds, press_ctrl_c)
    timer.start()
    return timer


def press_ctrl_c() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


@pytest.mark.core
def test_ctrl_c_at_any_moment_arrives_promptly_and_gives_everything_back(model, seed):
    inputs = mixed_prompts([5, 8], 128, seed)
    expected = greedy(model, inputs, 6)

    def generate_until(delay: float) -> None:
        interrupt_after(delay)
        greedy(model, inputs, 900)

    for delay in (*torch.rand(25).mul(0.05).tolist(), 0.31):
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            generate_until(delay)
        assert time.monotonic() - started < delay + 5
        assert_account_is_empty(model)
    torch.testing.assert_close(greedy(model, inputs, 6), expected)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def lock_is_taken_and_given_away(lock: LoopLock) -> None:
    with deferred(), lock.taken(fits=lambda: True):
        for _ in range(2):
            with lock.yielded(), allowed():
                pass


def interrupted_at(moment: int, function: Callable[[], Any], files: tuple[str, ...] = ("",)) -> bool:
    """Press Ctrl-C at a call or return inside a function and these files; whether there were as many."""
    passed = 0

    def press(frame: Any, *_: Any) -> None:
        nonlocal passed
        if frame.f_code.co_filename.endswith(files):
            passed += 1
            if passed == moment:
                signal.raise_signal(signal.SIGINT)

    sys.setprofile(press)
    try:
        function()
    except KeyboardInterrupt:
        return True
    finally:
        passed = moment  # what is called from here on is not the function's
        sys.setprofile(None)
    return False


@pytest.mark.core
def test_ctrl_c_at_every_call_and_return_leaves_the_lock_free_and_ctrl_c_as_it_was():
    """What an interrupt leaves half done is closed with its traceback: that must not take anything back."""
    lock, moment = LoopLock(), 0
    while interrupted_at(moment := moment + 1, lambda: lock_is_taken_and_given_away(lock)):
        assert lock._holder is None, moment
        assert not lock._loops, moment
        assert (_State.allowed, _State.pending) == (True, False), moment
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert moment > 50


BOOKS = (
    *("kvcache/pool.py", "kvcache/row.py", "paged_cache.py", "paged_layer.py", "runner.py", "growth.py"),
    *("model_runner.py", "persistent_batch.py", "decode_step.py", "interrupts.py"),
)


@pytest.mark.whole
def test_ctrl_c_at_calls_and_returns_of_a_forward_leaves_whole_books(model, executor, seed, request):
    """Pages are shared, copied, taken and given back; wherever that is interrupted, the cache goes on and is whole."""
    if executor is DeviceThread:
        pytest.skip("the books of a step are kept on another thread")
    stride = 1 if request.config.getoption("whole") else 11
    plain, moment = tiny_qwen3(eos_token_id=None), seed % stride
    first, more = torch.randint(3, 128, (2, 6)), torch.randint(3, 128, (4, 3))
    plain.requires_grad_(False)
    model.requires_grad_(False)
    kept = model.compiled.new_cache()
    model(first, past_key_values=kept)
    used = model.compiled.stats().pages.used

    def turn_of_a_chat(cache: Any) -> None:
        cache.batch_repeat_interleave(2)
        model(more[:, :1], past_key_values=cache)
        model(more[:, 1:], past_key_values=cache)
        cache.reorder_cache(torch.tensor([1, 1, 2, 0]))
        cache.crop(-2)

    done = False
    while not done:
        moment += stride
        cache = copy.deepcopy(kept)
        done = not interrupted_at(moment, lambda cache=cache: turn_of_a_chat(cache), BOOKS)
        pool = model.compiled.model_runner().pool
        rows = [*kept.generate_loop.rows, *cache.generate_loop.rows]
        owned = [page for row in rows for page in row.pages]
        assert all(pool._owners[page] == owned.count(page) for page in range(1, pool.total + 1)), moment
        assert pool.available == pool.total - len(set(owned)), moment
        for row, stored in zip(cache.generate_loop.rows, cache.stored, strict=True):
            assert row.exact_length == row.exact_position == stored.sum(), moment
            assert len(row.pages) == pool.pages_for(row.exact_length), moment
        assert (_State.allowed, _State.pending) == (True, False), moment
        cache.close()
        assert model.compiled.stats().pages.used == used
    assert moment > 100
    expected = plain(torch.cat([first, more[:2]], dim=1)).logits[:, 6:]
    torch.testing.assert_close(model(more[:2], past_key_values=kept).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.core
def test_ctrl_c_while_it_becomes_allowed_is_not_left_waiting():
    """Pressed at each line of entering: it arrives before the block begins, which may wait for ever."""
    lines = [line for _, _, line in allowed.__enter__.__code__.co_lines() if line is not None]
    for number in sorted(set(lines))[1:]:
        pressed, entered = [], []

        def press(frame, event, argument, number=number, pressed=pressed):
            if frame.f_code is allowed.__enter__.__code__:
                if event == "line" and frame.f_lineno == number and not pressed:
                    pressed.append(number)
                    signal.raise_signal(signal.SIGINT)
                return press
            return None

        sys.settrace(press)
        try:
            with deferred(), allowed():
                sys.settrace(None)
                entered.append(number)
        except KeyboardInterrupt:
            assert not entered, number
        else:
            assert not pressed, number
        finally:
            sys.settrace(None)
        assert (_State.allowed, _State.pending) == (True, False)


@pytest.mark.core
def test_ctrl_c_on_the_device_thread_waits_for_what_is_deferred_there():
    thread, begun, written = DeviceThread(torch.device("cpu")), threading.Event(), []

    def book() -> None:
        with deferred():
            begun.set()
            for _ in range(50):
                time.sleep(0.01)
            written.append("whole")
        while True:
            time.sleep(0.01)

    threading.Thread(target=lambda: begun.wait() and press_ctrl_c()).start()
    with pytest.raises(KeyboardInterrupt):
        thread.call(book)
    assert written == ["whole"]


def test_a_handler_of_the_users_own_keeps_ctrl_c(model, handler, seed):
    presses: list[int] = []
    signal.signal(signal.SIGINT, lambda *_: presses.append(1))
    inputs, timer = mixed_prompts([5], 128, seed), interrupt_after(0.05)
    assert greedy(model, inputs, 200).shape == (1, 205)
    timer.join()
    assert presses == [1]


def setting(handler: Any) -> Callback:
    """A streamer that sets a handler for Ctrl-C after the first token; its result is the one before."""
    callback = Callback(lambda: None if len(callback.results) else signal.signal(signal.SIGINT, handler))
    return callback


@pytest.mark.parametrize("own", [lambda *_: None, signal.SIG_IGN, signal.SIG_DFL], ids=["own", "ignored", "default"])
def test_a_handler_that_a_callback_sets_stays(own, model, handler, seed):
    for options in ({"streamer": setting(own)}, {}):
        greedy(model, mixed_prompts([5], 128, seed), 6, **options)
        assert signal.getsignal(signal.SIGINT) == own


def test_ctrl_c_works_with_the_handler_that_a_callback_found(model, handler, seed):
    streamer, inputs = setting(lambda *_: None), mixed_prompts([5], 128, seed)
    expected = greedy(model, inputs, 6, streamer=streamer)
    signal.signal(signal.SIGINT, streamer.results[0])
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert torch.equal(greedy(model, inputs, 6), expected)
    assert signal.getsignal(signal.SIGINT) is handler


def test_ctrl_c_while_waiting_for_the_loop_lock_leaves_it_to_its_holder(model):
    runtime = model.compiled
    holds, ended = threading.Event(), threading.Event()

    def hold() -> None:
        with runtime.loop_lock.taken(fits=lambda: True):
            holds.set()
            ended.wait(PATIENCE)

    def take_and_yield() -> Future[Any]:
        with runtime.loop_lock.taken(fits=lambda: True), runtime.loop_lock.yielded(), allowed():
            other = start(hold)
            assert holds.wait(PATIENCE)
            interrupt_after(0.2)
            threading.Timer(1.0, ended.set).start()
            others.append(other)
        return other

    others: list[Future[Any]] = []
    with pytest.raises(KeyboardInterrupt):
        take_and_yield()
    ended.set()
    others[0].result(timeout=PATIENCE)

    def take() -> bool:
        with runtime.loop_lock.taken(fits=lambda: True):
            return True

    assert in_thread(take)


@pytest.mark.core
def test_an_interrupt_that_comes_too_late_does_not_lose_the_next_call():
    """Ctrl-C may be aimed at a call that has just ended; the thread then waits for its next job."""
    thread = DeviceThread(torch.device("cpu"))
    ident = thread.call(threading.get_ident)
    time.sleep(0.1)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(KeyboardInterrupt))
    future = start(lambda: thread.call(lambda: 7))
    assert future.result(timeout=10) == 7


@pytest.mark.core
def test_an_interrupt_at_any_instruction_with_which_a_call_ends_does_not_end_the_thread():
    thread = DeviceThread(torch.device("cpu"))

    def interrupted_at(moment: int) -> bool:
        """Whether Python looks for interrupts so often from the end of what is called to that of the next call."""
        seen: list[str] = []
        last: dict[FrameType, str] = {}

        def trace(frame: FrameType, event: str, argument: object) -> Any:
            if frame.f_code.co_filename not in (device_thread.__file__, threading.__file__):
                return None
            frame.f_trace_opcodes = True
            if event == "opcode":
                # That is after calls, at the begin of functions and at the end of loops.
                if last.get(frame, "").startswith(("CALL", "RESUME", "JUMP_BACKWARD")):
                    seen.append(frame.f_code.co_name)
                last[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
                if len(seen) == moment:
                    sys.settrace(None)
                    raise KeyboardInterrupt
            return trace

        def job() -> int:
            frame = sys._getframe()
            while frame.f_code.co_name != "run":
                frame = frame.f_back
            frame.f_trace = trace
            frame.f_trace_opcodes = True
            sys.settrace(trace)
            return 7

        for function in (job, functools.partial(sys.settrace, None)):
            with suppress(KeyboardInterrupt):
                assert start(functools.partial(thread.call, function)).result(timeout=PATIENCE) in (7, None)
        return len(seen) >= moment

    moment = 1
    while interrupted_at(moment):
        assert start(lambda: thread.call(lambda: 8)).result(timeout=10) == 8, f"instruction {moment}"
        moment += 1
    assert moment > 5
