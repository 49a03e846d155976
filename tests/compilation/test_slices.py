"""A thread that works in slices: never beside whoever is in a hurry for long, and always to its end."""

from __future__ import annotations

import itertools
import random
import signal
import threading
import time
import weakref
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from typing import Any

import pytest
import torch
from hypothesis import Phase, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from compiled_llm.compat.contexts import of_one_call
from compiled_llm.compilation.graphs.slices import SLICE, SlicedThread
from support.in_threads import in_thread

LONGEST = 5
"""Seconds that anything here may take: a thread that nobody lets work any more fails its test."""


def finish(thread: SlicedThread) -> None:
    in_thread(thread.finish, LONGEST)


class Interrupted(BaseException):
    pass


class Slices(RuleBasedStateMachine):
    """Jobs count how often they could pause; they work only while they are let."""

    def __init__(self) -> None:
        super().__init__()
        self.thread = SlicedThread("slices")
        self.let = threading.Event()
        self.beside: list[str] = []
        self.steps = self.wanted = 0
        self.fails = False
        self.future: Any = None

    def job(self, pauses: int, fails: bool) -> int:
        for _ in range(pauses):
            if not self.let.is_set():
                self.beside.append("worked although nobody let it")
            self.steps += 1
            self.thread.pause()
        if fails:
            raise Interrupted
        return pauses

    def letting(self, call: Callable[[], None]) -> None:
        self.let.set()
        call()
        self.let.clear()

    @rule(pauses=st.integers(0, 5), fails=st.booleans())
    def begin(self, pauses: int, fails: bool) -> None:
        """If another is underway, it is finished first."""
        old = self.future
        self.letting(self.finish_if_any)
        self.future = self.thread.submit(lambda: self.job(pauses, fails))
        self.wanted, self.fails = pauses, fails
        assert old is None or old.done()

    def finish_if_any(self) -> None:
        finish(self.thread)
        if self.future is not None:
            self.check_result()

    def check_result(self) -> None:
        assert self.future.done()
        if self.fails:
            assert isinstance(self.future.exception(), Interrupted)
        else:
            assert self.future.result() == self.wanted
        self.future = None

    @precondition(lambda self: self.future is not None)
    @rule()
    def a_slice(self) -> None:
        before = self.steps
        self.letting(lambda: self.thread.run_slice(0.0, LONGEST))
        assert self.thread.idle == self.future.done()
        assert self.steps <= before + 1, "it pauses as soon as its slice is over"
        if self.thread.idle:
            self.check_result()

    @precondition(lambda self: self.future is not None)
    @rule()
    def the_rest(self) -> None:
        self.letting(self.finish_if_any)

    @precondition(lambda self: self.future is None)
    @rule()
    def nothing_to_do(self) -> None:
        self.thread.run_slice()
        finish(self.thread)
        assert self.thread.idle

    @invariant()
    def it_works_only_when_it_may(self) -> None:
        assert not self.beside

    def teardown(self) -> None:
        self.letting(self.finish_if_any)
        assert self.thread.idle


def test_jobs_work_only_in_their_slices_and_end_whatever_happens() -> None:
    run_state_machine_as_test(
        Slices,
        settings=settings(
            derandomize=True, deadline=None, max_examples=60, stateful_step_count=30, phases=[Phase.generate]
        ),
    )


def test_a_slice_that_takes_too_long_goes_on_beside() -> None:
    thread, ended = SlicedThread("long"), threading.Event()

    def job() -> str:
        assert ended.wait(LONGEST)
        thread.pause()
        return "done"

    future = thread.submit(job)
    thread.run_slice()
    assert not thread.idle
    thread.run_slice()  # it works already: nobody waits for it again
    ended.set()
    finish(thread)
    assert future.result() == "done"


def test_slices_go_on_until_what_the_giver_waits_for_has_ended() -> None:
    thread, pauses = SlicedThread("going on"), itertools.count()

    def job() -> int:
        while next(pauses) < 8:
            time.sleep(SLICE)
            thread.pause()
        return 8

    future, asked = thread.submit(job), itertools.count()
    thread.run_slices(lambda: next(asked) == 2)
    assert not future.done(), "what was waited for had ended"
    assert next(asked) == 3
    thread.run_slices(lambda: next(asked) < 0)
    assert future.result() == 8, "it waited until the job was done"


def test_it_begins_in_its_thread_once_and_what_fails_there_is_the_first_jobs() -> None:
    begun: list[threading.Thread] = []

    def begin() -> None:
        begun.append(threading.current_thread())
        raise RuntimeError("no device")

    thread = SlicedThread("beginning", begin)
    first, second = thread.submit(lambda: 1), None
    finish(thread)
    second = thread.submit(threading.current_thread)
    finish(thread)
    assert isinstance(first.exception(), RuntimeError)
    assert begun == [second.result()]
    assert second.result().name == "beginning"


def test_a_job_that_asks_for_its_own_end_does_not_wait_for_it() -> None:
    thread = SlicedThread("garbage")
    future = thread.submit(thread.finish)  # a finalizer may
    finish(thread)
    assert future.done()


def run_slices(thread: SlicedThread, future: Any) -> None:
    deadline = time.monotonic() + LONGEST
    while time.monotonic() < deadline and not future.done():
        thread.run_slice(patience=LONGEST)


@pytest.mark.parametrize("seed", range(3))
def test_ctrl_c_leaves_a_thread_that_can_go_on(seed: int) -> None:
    thread, rng = SlicedThread("interrupted"), random.Random(seed)

    def job() -> int:
        for _ in range(50):
            time.sleep(0.001)
            thread.pause()
        return 50

    future = thread.submit(job)
    timer = threading.Timer(rng.uniform(0.005, 0.03), signal.raise_signal, [signal.SIGINT])
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run_slices(thread, future)
    finally:
        timer.cancel()  # unless it has come: it must not end the whole run
        timer.join()
    finish(thread)
    assert future.result() == 50


@pytest.mark.usefixtures("one_thread")
def test_pytorch_uses_as_many_threads_as_the_caller() -> None:
    thread = SlicedThread("threads")
    for threads in (3, 1, 2):
        torch.set_num_threads(threads)
        future = thread.submit(torch.get_num_threads)
        finish(thread)
        assert future.result() == threads == torch.get_num_threads()


class Held:
    """What a call has, its cache for example."""


CALL: ContextVar[Held | None] = of_one_call(ContextVar("call of a test", default=None), None)


def test_a_job_that_waits_keeps_nothing_of_the_call_that_has_begun_it():
    """A capture goes on for many steps, and the pages of a cache are to be free once its user drops it."""
    thread, held = SlicedThread("slices"), Held()
    known = weakref.ref(held)

    def call(held: Held) -> Any:
        CALL.set(held)
        return thread.submit(lambda: CALL.get() is None)

    done = copy_context().run(call, held)
    del held
    assert known() is None
    finish(thread)
    assert done.result()
