"""A thread that calls compiled code for a model, if its callers' threads cannot."""

# Cudagraph trees belong to the thread that captured them, while users call from any thread; and torch modes that a
# caller has entered would be compiled in. The thread's own grad mode and autocast state never change, so that a
# caller's ``no_grad``, ``inference_mode`` or ``autocast`` cannot recompile anything.

from __future__ import annotations

import atexit
import ctypes
import functools
import queue
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from typing import Any, ParamSpec, TypeVar

import torch

from compiled_llm.compat.forks import HomeProcess, in_forked_processes
from compiled_llm.compat.torch.cudagraph_trees import adopt_cudagraph_trees
from compiled_llm.execution.threads.interrupts import allowed, deferred, guarded_by

_PATIENCE = 0.2
"""Seconds of one wait: Ctrl-C that came just before does not end it."""

P = ParamSpec("P")
T = TypeVar("T")


class _Flag:
    """An event whose ``set`` an exception between two instructions cannot tear apart, for one thread to wait for."""

    # That of ``threading`` takes locks in Python.

    def __init__(self) -> None:
        self.is_set = False
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()

    def set(self) -> None:
        self.is_set = True
        self._wake.put(None)

    def wait(self) -> bool:
        """Wait for a moment; return whether it has been set."""
        if not self.is_set:
            with suppress(queue.Empty):
                self._wake.get(timeout=_PATIENCE)
        return self.is_set


class _Job:
    """One call on its way to the thread and its result on the way back."""

    def __init__(self, function: Callable[[], Any], stream: torch.cuda.Stream | None) -> None:
        self.function = function
        self.stream = stream
        self.caller = threading.get_ident()
        self.started = False
        self.done = _Flag()
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self, after: torch.cuda.Stream | None) -> None:
        self.started = True
        try:
            if self.stream is not None and after is not None and after != self.stream:
                self.stream.wait_stream(after)  # buffers and pages are shared by all streams
            with torch.no_grad(), torch.cuda.stream(self.stream):
                self.result = self.function()
        except BaseException as error:
            self.error = error  # for the caller to raise
        finally:
            self.function = _nothing
            self.done.set()


def _nothing() -> None:
    return None


class _Worker:
    """A thread that runs jobs for ever."""

    # It is never ended: a thread that ends while the interpreter shuts down runs destructors that need the interpreter,
    # which aborts the process. Asleep, it does no harm, so workers are kept and used again.
    # A KeyboardInterrupt may arrive between any two instructions, so a job stays at the head of the queue until it is
    # done, and one is sent only under the guard, while its job runs and is not in the midst of bookkeeping.

    def __init__(self, device: torch.device, has_trees: bool) -> None:
        self.current: _Job | None = None
        self._jobs: deque[_Job] = deque()
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._guard = threading.Lock()
        self._books = threading.RLock()
        self.last_call = time.monotonic()
        self._last_stream: torch.cuda.Stream | None = None
        self.thread = threading.Thread(target=self._serve, args=(device, has_trees), name="compiled_llm", daemon=True)
        self.thread.start()
        _workers.append(self)

    def put(self, job: _Job) -> None:
        self._jobs.append(job)
        self._wake.put(None)

    def interrupt(self, job: _Job) -> None:
        """Raise KeyboardInterrupt inside the job if it is running."""
        with self._guard, self._books:
            if self.current is job and not job.done.is_set:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self.thread.ident or 0), ctypes.py_object(KeyboardInterrupt)
                )

    def _serve(self, device: torch.device, has_trees: bool) -> None:
        guarded_by(self._books)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if has_trees:
            adopt_cudagraph_trees()
        while True:
            try:
                while self._jobs and not _exiting.is_set():
                    self._run_first()
                self._wake.get()
            except KeyboardInterrupt:  # one that arrived while its job was ending
                continue

    def _run_first(self) -> None:
        job = self._jobs[0]
        if job.started and not job.done.is_set:  # interrupted before it could say so
            job.error = KeyboardInterrupt()
            job.done.set()
        if not job.started:
            with self._guard:
                self.current = job
            job.run(after=self._last_stream)
            self.last_call = time.monotonic()
            self._last_stream = job.stream
        with self._guard:
            self.current = None
        self._jobs.popleft()


class DeviceThread:
    """A runner of calls one after the other on its own thread; safe to use from any thread."""

    def __init__(self, device: torch.device, has_trees: bool = False) -> None:
        """Take an idle thread for the device, or start one, for calls with or without cudagraph trees."""
        # Other threads leave trees alone: before torch 2.13 the one that imports them keeps them from all others.
        self._device = device
        self._home = HomeProcess()
        idle = _idle[device, has_trees]
        try:
            self._worker = idle.pop()
        except IndexError:
            self._worker = _Worker(device, has_trees)
        weakref.finalize(self, idle.append, self._worker).atexit = False

    @property
    def caller(self) -> int | None:
        job = self._worker.current
        return None if job is None else job.caller

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``function`` on the thread, on the caller's CUDA stream; return its result, or raise its exception."""
        # Ctrl-C interrupts the running call and waits until it has stopped.
        if threading.current_thread() is self._worker.thread:
            return function(*args, **kwargs)
        self._home.check()
        if _exiting.is_set():
            threading.Event().wait()  # for ever: only a daemon thread gets here, and the interpreter is about to go
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        job = _Job(functools.partial(copy_context().run, lambda: function(*args, **kwargs)), stream)
        with deferred():
            self._worker.put(job)
            try:
                with allowed():
                    while not job.done.wait():
                        pass
            except BaseException:
                self._interrupt(job)
                raise
        error, job.error = job.error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame and the job's: neither may hold it
        result: T = job.result
        return result

    def call_briefly(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``function`` as ``call`` does: to hand it over takes longer than to be interrupted."""
        return self.call(function, *args, **kwargs)

    def _interrupt(self, job: _Job) -> None:
        """Raise KeyboardInterrupt inside a running call and wait for it to stop; one not begun yet will not run."""
        job.function = _nothing
        while job.started and not job.done.wait():
            self._worker.interrupt(job)


_idle: defaultdict[tuple[torch.device, bool], list[_Worker]] = defaultdict(list)
_workers: list[_Worker] = []
_exiting = threading.Event()


@in_forked_processes
def _forget_workers() -> None:
    _idle.clear()
    _workers.clear()


@atexit.register
def _finish_running_calls() -> None:
    """Let running calls of daemon threads end, and those threads come to rest at their next one."""
    # A thread that is inside torch while the interpreter shuts down aborts the process.
    _exiting.set()
    for worker in _workers:
        job = worker.current
        while job is not None and not job.done.wait():
            pass
        if time.monotonic() - worker.last_call < 1.0:
            time.sleep(0.1)
