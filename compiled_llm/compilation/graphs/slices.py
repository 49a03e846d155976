"""A thread that works in slices: only while another, urgent one lets it."""

# Python lets two busy threads take turns of 5 ms, whatever their urgency. Here one of them says when the other may
# work, and goes on when that pauses.

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Literal, TypeVar

import torch

from compiled_llm.compat.condition import Condition
from compiled_llm.compat.contexts import callers_context

T = TypeVar("T")

SLICE = 0.0005
"""Seconds. A decode step of a small model takes the device about as long, so that its host would have waited."""

PATIENCE = 0.001
"""Seconds until the giver of a slice goes on, if the thread has not paused by then, as it mostly does in 1 ms."""
# Loading a kernel or instantiating a graph take far longer, and go on concurrently, mostly without the interpreter
# lock.

_State = Literal["idle", "waiting", "working"]


class SlicedThread:
    """A thread that does one job at a time, and lives as long as the process."""

    # A job calls ``pause`` as often as it can. It waits there when its slice is over, until it is given another one.

    def __init__(self, name: str, begin: Callable[[], None] = lambda: None) -> None:
        """``begin`` is called in the thread, before the first job."""
        self._changed = Condition()
        self._state: _State = "idle"
        self._until = 0.0
        self._begin: Callable[[], None] | None = begin
        self._job: Callable[[], None] | None = None
        # A daemon: at the end of the process, a job that pauses gets no further slice.
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    # ---- the urgent thread

    @property
    def idle(self) -> bool:
        return self._state == "idle"

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Do a job in the slices to come, once another one that is underway is finished."""
        # PyTorch uses as many threads in it as in the caller's thread: programs that are compiled for one number of
        # threads would be compiled again for another.
        self.finish()
        future: Future[T] = Future()
        threads = torch.get_num_threads()
        with self._changed:
            context = callers_context()  # a job may wait for long: it keeps nothing of the call that has begun it
            self._job, self._state = lambda: context.run(lambda: self._complete(future, job, threads)), "waiting"
        return future

    def run_slice(self, seconds: float = SLICE, patience: float | None = PATIENCE) -> None:
        """Let it work until it pauses, after ``seconds`` if it can, or after ``patience`` seconds anyhow."""
        with self._changed:
            if self._state == "waiting":
                self._state, self._until = "working", time.perf_counter() + seconds
                self._changed.notify_all()
                self._changed.wait_for(self._rests, patience)

    def run_slices(self, ended: Callable[[], bool]) -> None:
        """Let it work for a slice, and for further ones until its job is done or its time has ``ended``."""
        self.run_slice()
        while not (ended() or self.idle):
            with self._changed:  # it may still be loading a kernel
                self._changed.wait_for(self._rests, PATIENCE)
            self.run_slice()

    def finish(self) -> None:
        """Let it work until its job is done; any thread may."""
        if threading.current_thread() is self._thread:  # garbage that was collected there
            return
        while not self.idle and self._thread.is_alive():  # in a forked process it is not
            self.run_slice(float("inf"), None)
            with self._changed:
                self._changed.wait_for(self._rests)

    def _rests(self) -> bool:
        return self._state != "working"

    # ---- in the thread

    def pause(self) -> None:
        """Wait for another slice, if this one is over."""
        if time.perf_counter() >= self._until:
            with self._changed:
                self._rest("waiting")
                self._changed.wait_for(lambda: self._state == "working")

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._state == "working")
                job, self._job = self._job, None
            assert job is not None
            job()
            del job  # whatever it held
            with self._changed:
                self._rest("idle")

    def _complete(self, future: Future[T], job: Callable[[], T], threads: int) -> None:
        try:
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)
            begin, self._begin = self._begin, None
            if begin is not None:
                begin()
            future.set_result(job())
        except BaseException as error:  # raised from the future's result
            future.set_exception(error)

    def _rest(self, state: _State) -> None:
        self._state = state
        self._changed.notify_all()
