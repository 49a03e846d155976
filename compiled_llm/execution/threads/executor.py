"""Runs compiled calls one at a time, in a world that the caller's contexts cannot change."""

# Loops, callbacks, streamers and stopping criteria are not run here: they stay in the caller's thread, with its context
# variables, debugger and tracebacks.

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, Protocol, TypeVar

import torch

from compiled_llm.config import WrapConfig
from compiled_llm.execution.threads.calling_thread import CallingThread
from compiled_llm.execution.threads.device_thread import DeviceThread

P = ParamSpec("P")
T = TypeVar("T")


class Executor(Protocol):
    """A runner of a model's compiled calls; safe to use from any thread."""

    @property
    def caller(self) -> int | None:
        """Identity of the thread whose call is running."""

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``function`` and return its result; its exceptions, and Ctrl-C, reach the caller."""
        ...

    def call_briefly(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``function``, which takes no time to speak of, as ``call`` does; Ctrl-C comes before it or after it."""
        ...


def executor_for(device: torch.device, config: WrapConfig) -> Executor:
    # Cudagraph trees belong to the thread that captured them, so a thread of our own runs them. All else runs on the
    # caller's: to wake another and wait for it takes time in each step. On a CPU it would halve the speed: OpenMP gives
    # each thread a team of workers, and once there are more of them than cores, all sleep between any two loops.
    return DeviceThread(device, has_trees=True) if config.uses_trees_on(device.type) else CallingThread(device)
