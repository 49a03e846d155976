"""The steps to capture while others run, the most urgent first."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from compiled_llm.compilation.graphs.step_key import StepKey

Begin = Callable[[], "Begin | None"]
"""Begins a capture, or returns what goes on with it in the next slice."""

_MOST = 8
"""Each may keep what its step has given on the device."""


class _Wanted(NamedTuple):
    key: StepKey
    begin: Begin
    padded: bool
    lasts: bool = False  # whether a launch has followed the one that wanted it


class WantedSteps:
    """Steps that have run without a CUDA graph of their own."""

    # One is captured at a time, and takes steps their time. Until then decode steps that are launched kernel by kernel
    # cost the most: they come again and again. Prefills come between them, and what is padded runs in a CUDA graph
    # already. While requests come, each step has more rows than the one before, so of equals the newest is the next.
    # Any thread may call ``clear``: what another is doing concerns those before.

    def __init__(self) -> None:
        self._wanted: dict[StepKey, _Wanted] = {}  # in the order in which they were wanted last

    def __len__(self) -> int:
        return len(self._wanted)

    def add(self, key: StepKey, begin: Begin, padded: bool) -> None:
        """Note that a launch has wanted a step; ``padded`` if it has run in a larger one."""
        wanted = self._wanted
        before = wanted.pop(key, None)
        wanted[key] = _Wanted(key, begin, padded, before is not None and before.lasts)
        if len(wanted) > _MOST:
            del wanted[max(wanted.values(), key=_rank).key]  # the first of the least urgent ones

    def take(self, settled: bool) -> tuple[StepKey, Begin] | None:
        """Take the most urgent step out; None if there is none, or it waits for another launch.

        It does if the last launch was the first to want it, and the steps to come are not likely to be as that one,
        which is then not ``settled``.
        """
        wanted = self._wanted
        first = min(reversed(wanted.values()), key=_rank, default=None)  # the last of the most urgent ones
        if first is None or not (settled or first.lasts):
            return None
        del wanted[first.key]
        return first.key, first.begin

    def launched(self) -> None:
        """Note that a launch is over."""
        wanted = self._wanted
        for key, step in wanted.items():
            wanted[key] = step._replace(lasts=True)

    def clear(self) -> None:
        self._wanted = {}


def _rank(step: _Wanted) -> tuple[bool, bool]:
    return step.padded, step.key.phase != "decode"
