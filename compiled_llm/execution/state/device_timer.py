"""Measures the device's time for launches."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


class DeviceTimer:
    """A timer of launches from ``start`` to ``stop``, in stream order; on a CPU, those are done when they return."""

    def __init__(self, device: torch.device) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else []
        self._began = self._took = 0.0

    def start(self) -> None:
        self._began = time.perf_counter()
        if self._events:
            self._events[0].record()

    def stop(self) -> None:
        self._took = time.perf_counter() - self._began
        if self._events:
            self._events[1].record()

    def of(self, function: Callable[P, T]) -> Callable[P, T]:
        """Return a function that launches what ``function`` does, between ``start`` and ``stop``."""

        def timed(*args: P.args, **kwargs: P.kwargs) -> T:
            self.start()
            result = function(*args, **kwargs)
            self.stop()
            return result

        return timed

    @property
    def seconds(self) -> float:
        """The time, after ``stop``; on CUDA, this waits until the device is done with the launches."""
        if not self._events:
            return self._took
        self._events[1].synchronize()  # it is done where tokens of these launches have been read
        return float(self._events[0].elapsed_time(self._events[1])) / 1000
