"""The profiler on decode steps in the middle of a call of ``generate``."""

from __future__ import annotations

from typing import Any

import torch

from compiled_llm.commands.bench.timing import TokenClock
from compiled_llm.explaining.profile.kernels import KernelProfiler


class StepProfiler(KernelProfiler):
    """Profiles some decode steps of a call.

    Between the tokens ``after`` and ``after + steps`` of the stream, a loop launches exactly ``steps`` steps, whether
    or not it runs ahead of what it streams; the device is idle at both ends.

    Attributes:
        clock: the streamer that starts and stops the profiler.
    """

    def __init__(self, device: torch.device, steps: int, after: int) -> None:
        """Prepare.

        Args:
            device: what is profiled.
            steps: how many steps.
            after: how many tokens come before them, at least one.
        """
        super().__init__(device)
        self.clock = _SwitchingClock(self, max(1, after), max(1, after) + steps)


class _SwitchingClock(TokenClock):
    def __init__(self, profiler: KernelProfiler, first: int, last: int) -> None:
        super().__init__()
        self._profiler = profiler
        self._first = first
        self._last = last

    def put(self, value: Any) -> None:
        super().put(value)
        if len(self.times) == self._first:
            self._profiler.start()
        if len(self.times) == self._last:
            self._profiler.stop()
