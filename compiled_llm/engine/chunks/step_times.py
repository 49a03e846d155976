"""How long steps take, learned from those that were timed."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from itertools import pairwise
from statistics import median

import numpy as np

from compiled_llm.compilation.graphs.captured_shapes import CAPTURED_TOKENS

SIZES = (*CAPTURED_TOKENS, 5120, 6144, 7168, 8192, 12288, 16384, 32768, 65536)
"""The tokens of prompts that steps are told apart by, rounded up: what a launch is padded to."""
_LATEST = 5
"""Of so many steps of a kind the median counts, so that odd ones do not."""
_REMEMBERED = 500
"""Steps with prompts after which a size that has not run again is forgotten, as it may be faster now."""
_SMALL = 4
"""The largest size is so many times as large as one that is small, at least."""


class _Latest:
    """The times of the latest steps of one kind."""

    def __init__(self) -> None:
        self._seconds = deque[float](maxlen=_LATEST)
        self.median = 0.0
        self.step = 0

    @property
    def seconds(self) -> tuple[float, bool]:
        """The median, and whether one odd step could not be it."""
        return self.median, len(self._seconds) > 2

    def add(self, seconds: float, step: int) -> None:
        self._seconds.append(seconds)
        self.median = median(self._seconds)
        self.step = step


class StepTimes:
    """The times of steps: of those without prompts by their rows, and how much longer prompts make a step."""

    def __init__(self) -> None:
        self._decode: dict[int, _Latest] = {}  # by their rows, rounded up to a power of two
        self._longer: tuple[dict[int, _Latest], dict[int, _Latest]] = {}, {}  # by ``SIZES``; alone, and beside rows
        self._table: list[list[float] | None] = [None, None]  # what ``longer`` says of each size
        self._steps = 0

    def learn(self, rows: int, tokens: int, seconds: float) -> None:
        """Learn from a step of ``rows`` that went on and ``tokens`` of prompts, padding included."""
        if not tokens:
            self._decode.setdefault(_rounded(rows), _Latest()).add(seconds, 0)
            return
        without = (self.decode(rows) or 0.0) if rows else 0.0
        self._steps += 1
        known = self._longer[rows > 0]
        known.setdefault(SIZES[place_of(tokens)], _Latest()).add(max(0.0, seconds - without), self._steps)
        for size in [size for size, latest in known.items() if latest.step < self._steps - _REMEMBERED]:
            del known[size]
        self._table[rows > 0] = _filled({size: latest.seconds for size, latest in known.items()})

    def knows(self, rows: int) -> bool:
        """Whether a step of about so many rows was timed."""
        return _rounded(rows) in self._decode

    def decode(self, rows: int) -> float | None:
        """Return the seconds of a step of so many rows without prompts; None if no such step was timed."""
        wanted = _rounded(rows)
        if (known := self._decode.get(wanted)) is None and self._decode:
            known = self._decode[min(self._decode, key=lambda each: abs(each.bit_length() - wanted.bit_length()))]
        return None if known is None else known.median

    def longer(self, rows: int) -> list[float] | None:
        """Return by how many seconds prompts of each of ``SIZES`` make a step of so many rows longer; None at first.

        What was not timed lies on the line between what was, or through the two largest up to the next size; any other
        is as slow as the largest for each token.
        """
        # What prompts take alone is what they take beside rows, unless both are one launch.
        return self._table[rows > 0] or self._table[0]

    def least(self, rows: int) -> float:
        """Return by how many seconds prompts make a step of so many rows longer however few tokens they have.

        The line through what a small size took and what the largest did leaves that for no tokens. It is 0.0 until
        a size was timed that is small beside the largest.
        """
        known = {size: latest.median for size, latest in (self._longer[rows > 0] or self._longer[0]).items()}
        largest = max(known, default=0)
        small = min((size for size in known if size * _SMALL <= largest), key=known.__getitem__, default=None)
        if small is None:
            return 0.0
        return max(0.0, known[small] - small * (known[largest] - known[small]) / (largest - small))


def place_of(tokens: int) -> int:
    """Return the place in ``SIZES`` of the smallest that holds so many tokens, or of the largest."""
    return min(bisect_left(SIZES, tokens), len(SIZES) - 1)


def _filled(known: dict[int, tuple[float, bool]]) -> list[float]:
    """Return the seconds of each size, by those of some, and whether they are sure."""
    table: list[float] = []
    sizes = [0, *sorted(known)]
    times = [0.0]
    slope = 0.0
    for below, size in pairwise(sizes):
        seconds, sure = known[size]
        if below and not sure:  # then no token takes longer than those before it
            seconds = min(seconds, times[-1] * size / below)
        times.append(seconds)
        slope = (times[-1] - times[-2]) / (size - below) if below or size > SIZES[0] else 0.0
    largest = sizes[-1]
    slowest = times[-1] / sizes[-1]
    for place, size in enumerate(SIZES):
        if size <= largest:
            table.append(float(np.interp(size, sizes, times)))
        elif SIZES[place - 1] == largest:  # it is tried if those below it say so
            table.append(times[-1] + max(0.0, min(slope, slowest)) * (size - largest))
        else:
            table.append(slowest * size)
    return table


def _rounded(rows: int) -> int:
    return 1 << max(0, rows - 1).bit_length()
