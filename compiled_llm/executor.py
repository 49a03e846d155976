"""The one thread that calls compiled code for a model.

Cudagraph trees belong to the thread that recorded them, while users call from any thread. So compiled calls, and
nothing else, run here; loops, callbacks, streamers and stopping criteria stay in the caller's thread with its context
variables, debugger and tracebacks. The thread's own grad mode and autocast state never change, so that a caller's
``no_grad``, ``inference_mode`` or ``autocast`` cannot recompile anything.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from compiled_llm.compat import adopt_cudagraph_trees

P = ParamSpec("P")
T = TypeVar("T")


class _Job:
    """One call on its way to the thread and its result on the way back."""

    def __init__(self, function: Callable[[], Any], stream: torch.cuda.Stream | None) -> None:
        self.function = function
        self.stream = stream
        self.caller = threading.get_ident()
        self.started = False
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        self.started = True
        try:
            with torch.no_grad(), torch.cuda.stream(self.stream):
                self.result = self.function()
        except BaseException as error:
            self.error = error  # for the caller to raise
        finally:
            self.function = _nothing
            self.done.set()


def _nothing() -> None:
    return None


class DeviceThread:
    """Runs calls one after the other on a thread of its own; safe to use from any thread.

    Attributes:
        caller: identity of the thread that waits for the running call.
    """

    def __init__(self, device: torch.device) -> None:
        """Start the thread."""
        self._device = device
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._running: list[_Job] = []
        self._thread = threading.Thread(
            target=_serve, args=(self._jobs, self._running, device), name="compiled_llm", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, _stop, self._jobs, self._thread)

    @property
    def caller(self) -> int | None:
        """Identity of the thread that waits for the running call."""
        return self._running[0].caller if self._running else None

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``function`` on the thread, on the caller's CUDA stream, and return its result.

        An exception is re-raised with its traceback. Ctrl-C interrupts the running call and waits until it has
        stopped.
        """
        if threading.current_thread() is self._thread:
            return function(*args, **kwargs)
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        job = _Job(lambda: function(*args, **kwargs), stream)
        self._jobs.put(job)
        try:
            job.done.wait()
        except BaseException:
            self._interrupt(job)
            raise
        if job.error is not None:
            try:
                raise job.error
            finally:
                del job  # the error's traceback holds this frame: without it, no cycle
        result: T = job.result
        return result

    def _interrupt(self, job: _Job) -> None:
        """Raise KeyboardInterrupt inside a running call and wait for it to stop; one not begun yet will not run."""
        job.function = _nothing
        while job.started and not job.done.wait(timeout=0.2):
            if job in self._running:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._thread.ident or 0), ctypes.py_object(KeyboardInterrupt)
                )


def _stop(jobs: queue.SimpleQueue[_Job | None], thread: threading.Thread) -> None:
    """End the thread and wait for it: one that still runs while the interpreter shuts down aborts the process."""
    jobs.put(None)
    if threading.current_thread() is not thread:
        thread.join()


def _serve(jobs: queue.SimpleQueue[_Job | None], running: list[_Job], device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
        adopt_cudagraph_trees()
    last_stream: torch.cuda.Stream | None = None
    while True:
        try:
            job = jobs.get()
            if job is None:
                return
            running.append(job)
            if job.stream is not None and last_stream is not None and job.stream != last_stream:
                job.stream.wait_stream(last_stream)  # buffers and pages are shared by all streams
            last_stream = job.stream
            job.run()
        except KeyboardInterrupt:  # one that arrived just after its call had ended
            continue
        finally:
            running.clear()
            job = None  # or the last result would stay alive until the next call
