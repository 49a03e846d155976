"""How long the device takes for what is launched, read once it is done."""

from __future__ import annotations

import time

import torch


class DeviceTimer:
    """Times one stretch of launches; on a CPU what is launched is done when it returns."""

    def __init__(self, device: torch.device) -> None:
        """Begin now, in stream order."""
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else []
        self._began = time.perf_counter()
        self._took = 0.0
        if self._events:
            self._events[0].record()

    def stop(self) -> None:
        """End, in stream order."""
        self._took = time.perf_counter() - self._began
        if self._events:
            self._events[1].record()

    @property
    def seconds(self) -> float:
        """How long it took; on CUDA, the device must be done with what was launched before ``stop``."""
        return self._events[0].elapsed_time(self._events[1]) / 1000 if self._events else self._took
