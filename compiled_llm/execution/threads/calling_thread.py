"""Runs compiled calls on the thread that asks for them, if no CUDA graph belongs to a thread."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import ParamSpec, TypeVar

import torch

from compiled_llm.compat.forks import HomeProcess, lock
from compiled_llm.compat.torch.modes import inside_torch_modes
from compiled_llm.execution.threads.device_thread import DeviceThread
from compiled_llm.execution.threads.interrupts import allowed, check, deferred

P = ParamSpec("P")
T = TypeVar("T")


class CallingThread:
    """A runner of calls one after the other, each on its caller's thread; safe to use from any thread."""

    def __init__(self, device: torch.device, awaited: bool = True) -> None:
        """``awaited``: a call that runs when the process ends is waited for."""
        self._device = device
        self._on_device = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        self._home = HomeProcess()
        self._lock = lock()
        self._caller: int | None = None
        self._aside: DeviceThread | None = None
        self._stream: torch.cuda.Stream | None = None
        if awaited:
            _executors.add(self)

    @property
    def caller(self) -> int | None:
        return self._caller

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``function`` here and return its result."""
        # Torch modes that the caller has entered (``with torch.device(...)`` is one) cannot be left meanwhile, and
        # would be compiled into the graphs; such a call runs on another thread.

        def interruptible() -> T:
            with allowed():
                return function(*args, **kwargs)

        return self.call_briefly(interruptible)

    def call_briefly(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``function``, which takes no time to speak of, as ``call`` does; Ctrl-C comes before it or after it."""
        self._home.check()
        with deferred(), self._lock:
            check()  # while all calls are brief, it would come after the last one
            here = threading.get_ident()
            if self._caller == here:
                return function(*args, **kwargs)
            self._caller = here
            try:
                if self._device.type == "cuda":
                    self._follow_last_call()
                if inside_torch_modes():
                    self._aside = self._aside or DeviceThread(self._device)
                    return self._aside.call(function, *args, **kwargs)
                leaves = (
                    torch.is_grad_enabled()
                    or torch.is_inference_mode_enabled()
                    or any(map(torch.is_autocast_enabled, _AUTOCAST_DEVICES))
                    or not torch.is_autocast_cache_enabled()
                )
                with self._on_device, _outside() if leaves else _STAYS:
                    return function(*args, **kwargs)
            finally:
                self._caller = None

    def _follow_last_call(self) -> None:
        """Let the caller's CUDA stream wait for that of the last call: buffers and pages are shared by all streams."""
        stream = torch.cuda.current_stream(self._device.index)
        if self._stream is not None and stream != self._stream:
            stream.wait_stream(self._stream)
        self._stream = stream

    def shut_down(self) -> None:
        """Wait for the running call, and let other threads begin none."""
        self._lock.acquire()


_AUTOCAST_DEVICES = ("cpu", "cuda")


_STAYS = nullcontext()
"""In place of ``_outside``: mostly nothing is to be left, since HuggingFace's ``generate`` computes no gradients."""


@contextmanager
def _outside() -> Iterator[None]:
    """Leave the caller's gradient mode, inference mode and autocast: graphs are compiled for one world."""
    casting = [device for device in _AUTOCAST_DEVICES if torch.is_autocast_enabled(device)]
    caching = torch.is_autocast_cache_enabled()
    for device in casting:
        torch.set_autocast_enabled(device, False)
    torch.set_autocast_cache_enabled(True)
    try:
        with torch.inference_mode(False), torch.no_grad():
            yield
    finally:
        torch.set_autocast_cache_enabled(caching)
        for device in casting:
            torch.set_autocast_enabled(device, True)


_executors: weakref.WeakSet[CallingThread] = weakref.WeakSet()


@atexit.register
def _let_calls_end() -> None:
    """Let running calls of daemon threads end: one inside torch while the interpreter shuts down aborts the process."""
    for executor in list(_executors):
        executor.shut_down()
