"""How many tokens of prompts fit into a step, learned from how long steps have taken."""

from __future__ import annotations

import logging
import math
from typing import NamedTuple

logger = logging.getLogger("compiled_llm.engine")

_SMALLEST = 16
_LARGEST = 2**16
_OF_THE_LATEST = 0.25
"""The weight of the latest step in the estimate for the next one."""
_FADING = 0.99
"""A size that seemed too long seems this much shorter after each step that could have been longer."""
# So one odd step does not forbid it for ever.
_EVERY = 16
"""Of steps without prompts, one of so many is timed."""
_STEPS_TOO_LONG = 3
"""So many steps of the smallest chunks, one after the other, are no accident."""


class _SmallStep(NamedTuple):
    """A step with so few tokens of prompts that it cannot be made shorter."""

    seconds: float
    decoding: int
    tokens: int
    mixed: bool


class TokenBudget:
    """A budget of tokens for a step's chunks, so that steps stay within a time."""

    # Decode steps are told apart by their rows, and chunks by their tokens, both rounded up to a power of two. A chunk
    # twice as large as any that was seen is taken to last twice as long, so chunks grow step by step.

    def __init__(self, max_step_ms: float | None, max_tokens: int, mixed: bool = False) -> None:
        """Steps may take ``max_step_ms`` on the device (None for any time); chunks have up to ``max_tokens``."""
        # If all steps with prompts are ``mixed``, chunks leave room for the token of each running row.
        self._limit = math.inf if max_step_ms is None else max_step_ms / 1000
        self.bounded = max_step_ms is not None  # whether steps have to be timed
        self._max_tokens = max_tokens
        self._mixed = mixed
        self._decode: dict[int, float] = {}
        self._chunk: dict[int, float] = {}
        self._untimed = 0  # steps since the last one that was timed
        self._too_long: list[_SmallStep] = []  # the latest steps of the smallest chunks, if all were
        self._told = False

    def tokens(self, decoding: int) -> int:
        """Return how many tokens of prompts may run next to so many rows; at least a few, so that prompts go on."""
        most = self._max_tokens
        if self._mixed:
            few = max(1, min(_SMALLEST, most // 2))  # all of them would leave even one row no room
            most = max(few, most - decoding)
        if not self.bounded:
            return most
        left = self._limit - (0.0 if self._mixed else self._decode.get(_rounded(decoding), 0.0))
        size = _SMALLEST
        while size < most and self._seconds(2 * size) <= left:
            size *= 2
        return min(most, size)

    def wants_time_of(self, decoding: int, prompts: bool) -> bool:
        """Return whether to time the next step: each with prompts, and a sample of those without."""
        self._untimed += 1
        if not (prompts or self._untimed >= _EVERY or _rounded(decoding) not in self._decode):
            return False
        self._untimed = 0
        return True

    def _seconds(self, size: int) -> float:
        """Return how long a chunk lasts, or would if it lasted twice as long as one half as large."""
        if size not in self._chunk:
            return 2 * self._chunk.get(size // 2, math.inf)
        return self._chunk[size]

    def ran(self, decoding: int, tokens: int, seconds: float, mixed: bool = False) -> None:
        """Learn from a step of ``decoding`` rows and ``tokens`` of prompts, which took the device ``seconds``."""
        # A ``mixed`` step counts as its chunk: a chunk of the same size takes no longer in a launch of its own.
        if 0 < tokens <= _SMALLEST and not self._told:
            self._compare_with_limit(_SmallStep(seconds, decoding, tokens, mixed))
        rows = _rounded(decoding)
        if not tokens:
            _learn(self._decode, rows, seconds)
        elif mixed or not decoding or rows in self._decode:
            size = max(_SMALLEST, _rounded(tokens))
            _learn(self._chunk, size, max(0.0, seconds - (0.0 if mixed else self._decode.get(rows, 0.0))))
            self._chunk |= {larger: _FADING * known for larger, known in self._chunk.items() if larger > size}

    def _compare_with_limit(self, step: _SmallStep) -> None:
        """Tell the user once if steps cannot be as short as they should be, and how long they have to be."""
        if step.seconds <= self._limit:
            self._too_long.clear()
            return
        self._too_long.append(step)
        if len(self._too_long) < _STEPS_TOO_LONG:
            return
        self._told, usual = True, sorted(self._too_long)[_STEPS_TOO_LONG // 2]
        taken, least = round(1000 * usual.seconds, 2), (1 + math.floor(10_000 * usual.seconds)) / 10
        logger.warning(
            "compiled_llm: max_step_ms=%g: one %s (running requests: %d, tokens of prompts: %d) takes %g ms, and no "
            "chunk is smaller; give at least max_step_ms=%g",
            *(1000 * self._limit, "mixed step" if usual.mixed else "step", usual.decoding, usual.tokens, taken, least),
        )


def _rounded(count: int) -> int:
    """Return the power of two that a number of rows or tokens is counted under."""
    return min(_LARGEST, 1 << max(0, count - 1).bit_length())


def _learn(known: dict[int, float], key: int, seconds: float) -> None:
    before = known.get(key, seconds)
    known[key] = before + _OF_THE_LATEST * (seconds - before)
