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
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with torch.no_grad(), torch.cuda.stream(self.stream):
                self.result = self.function()
        except BaseException as error:  # handed to the caller, who re-raises it
            self.error = error
        finally:
            self.function = _nothing
            self.done.set()


def _nothing() -> None:
    return None


class DeviceThread:
    """Runs calls one after the other on a thread of its own; safe to use from any thread."""

    def __init__(self, device: torch.device) -> None:
        """Prepare; the thread starts with the first call."""
        self._device = device
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._start = threading.Lock()
        self._last_stream: torch.cuda.Stream | None = None

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``function`` on the thread, on the caller's CUDA stream, and return its result.

        An exception is re-raised with its traceback. Ctrl-C interrupts the running call and waits until it has
        stopped.
        """
        thread = self._running_thread()
        if threading.current_thread() is thread:
            return function(*args, **kwargs)
        job = _Job(lambda: function(*args, **kwargs), self._ordered_stream())
        self._jobs.put(job)
        try:
            job.done.wait()
        except BaseException:
            self._interrupt(thread, job)
            raise
        if job.error is not None:
            raise job.error
        result: T = job.result
        return result

    def _running_thread(self) -> threading.Thread:
        with self._start:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=_serve, args=(self._jobs, self._device), name="compiled_llm", daemon=True
                )
                self._thread.start()
                weakref.finalize(self, _stop, self._jobs, self._thread)
            return self._thread

    def _ordered_stream(self) -> torch.cuda.Stream | None:
        """Return the caller's stream, ordered behind the stream that the last call used."""
        if self._device.type != "cuda":
            return None
        stream = torch.cuda.current_stream(self._device)
        if self._last_stream is not None and stream != self._last_stream:
            stream.wait_stream(self._last_stream)
        self._last_stream = stream
        return stream

    @staticmethod
    def _interrupt(thread: threading.Thread, job: _Job) -> None:
        """Raise KeyboardInterrupt inside a running call and wait for it to stop."""
        while not job.done.wait(timeout=0.2):
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread.ident or 0), ctypes.py_object(KeyboardInterrupt)
            )


def _stop(jobs: queue.SimpleQueue[_Job | None], thread: threading.Thread) -> None:
    """End the thread and wait for it: one that still runs while the interpreter shuts down aborts the process."""
    jobs.put(None)
    if threading.current_thread() is not thread:
        thread.join()


def _serve(jobs: queue.SimpleQueue[_Job | None], device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
        adopt_cudagraph_trees()
    while True:
        try:
            job = jobs.get()
            if job is None:
                return
            job.run()
            del job  # or the last result would stay alive until the next call
        except KeyboardInterrupt:  # one that arrived just after its call had ended
            continue
