"""Chunks that make steps only so much longer than they are without prompts."""

from __future__ import annotations

import math

from compiled_llm.engine.chunks.state import ChunkState
from compiled_llm.engine.chunks.step_times import SIZES, place_of

STRETCH = 1.6
"""A step with prompts may take so many times as long as one without, if they come often."""
_OFTEN = 0.12
"""Requests that begin in a step, if they come often; if half as many do, steps may be longer by twice as much."""
_LATELY = 500
"""Steps over which requests are counted."""
_STEPS = 3
"""Prompts that wait are computed in so many steps, if that takes longer steps than these."""

_AS_LONG = 1.03
"""What takes hardly longer is as long."""


class Stretched:
    """A policy by which steps with prompts take ``STRETCH`` times as long as those without, if anybody follows.

    They may take longer while prompts are rare, since few gaps between tokens are long then; when prompts pile up,
    since these would wait for ever; and where a chunk costs much however small it is, as with a small model: there it
    makes a step longer by ``STRETCH`` times that, since smaller ones would leave gaps hardly shorter.
    """

    def __init__(self, stretch: float = STRETCH, often: float = _OFTEN, steps: int = _STEPS) -> None:
        self._stretch = stretch
        self._often = often
        self._steps = steps
        self._begin = 0.0  # requests that begin in a step, lately
        self._step = self._begun = 0  # until which they are counted

    def plan(self, state: ChunkState) -> int:
        self._count(state)
        left = state.left
        if not (left and state.rows and state.followed):
            return state.most
        without = state.times.decode(state.rows)
        longer = state.times.longer(state.rows)
        if without is None or longer is None:
            return state.most
        sizes = SIZES[: place_of(state.most + state.padding) + 1]
        often = max(1.0, self._often / max(self._begin, 1e-9))
        allowed = max(self._stretch * state.times.least(state.rows), (self._stretch - 1) * without * often)
        fits = [size for size, seconds in zip(sizes, longer, strict=False) if seconds <= _AS_LONG * allowed]
        needed = SIZES[place_of(-(-left // self._steps) + state.padding)]
        return max([*fits, needed]) - state.padding

    def _count(self, state: ChunkState) -> None:
        fade = math.exp((self._step - state.step) / _LATELY)
        self._begin = fade * self._begin + (state.begun - self._begun) / _LATELY
        self._step = state.step
        self._begun = state.begun
