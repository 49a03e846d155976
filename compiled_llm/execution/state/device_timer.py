"""Measures the device's time for launches."""

from __future__ import annotations

import time

import torch


class DeviceTimer:
    """A timer of launches from now until ``stop``, in stream order; on a CPU, those are done when they return."""

    def __init__(self, device: torch.device) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else []
        self._began = time.perf_counter()
        self._took = 0.0
        if self._events:
            self._events[0].record()

    def stop(self) -> None:
        self._took = time.perf_counter() - self._began
        if self._events:
            self._events[1].record()

    @property
    def seconds(self) -> float:
        """The time; on CUDA, the device must be done with all launches before ``stop``."""
        return self._events[0].elapsed_time(self._events[1]) / 1000 if self._events else self._took
