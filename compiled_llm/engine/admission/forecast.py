"""The expected cost of a load under a policy, simulated over drawn lengths."""

# Time is counted in steps from now. All rows grow by a token a step, so one that had ``a`` tokens at time 0, or would
# have had, has ``a + t`` at time t: sums over rows need no walk through them. Pages count as tokens, and each row as
# half a page more.

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

_AGAIN = 200
"""Tokens that take as long to compute again as what a step costs whatever it holds: 5.5 ms with 8B on an H100."""
_INSTANT = 1e-6


class ExpectedLoad(NamedTuple):
    """Rows that run and requests that wait, the next one first."""

    room: float  # tokens that all rows can hold
    max_rows: int
    tokens: Numbers  # ``[R]`` that running rows have
    left: Numbers  # ``[R]`` that they grow by
    next_tokens: Numbers  # ``[W]`` likewise, of those that wait
    next_left: Numbers
    weight: float = 1.0  # requests that each of these stands for


def cost_of_peaks(load: ExpectedLoad) -> float:
    """Return the steps until all have ended, and what is computed again, if each begins as soon as all fit to the end.

    What is computed again is of rows that run already, and do not fit to their ends.
    """
    rows, waiting, again = (
        _Rows.of(load),
        list(zip(load.next_tokens.tolist(), load.next_left.tolist(), strict=True)),
        0.0,
    )
    now = 0.0
    lost = list[tuple[float, float]]()
    while (full := rows.full(load.room)) is not None:
        now, (tokens, left) = full, rows.lose_shortest(full)
        lost.append((tokens, left))
        again += tokens
    now = 0.0
    for tokens, left in lost + waiting:
        now = rows.begin(now, tokens, left, load)
    return max(now, rows.last) + again * load.weight / _AGAIN


class _Rows:
    """Rows that run to their ends, sorted by these."""

    def __init__(self, ends: Numbers, begun: Numbers) -> None:
        self._ends, self._begun = ends, begun  # ``begun``: the tokens that each would have had at time 0
        self._needs = self._summed()  # of all rows, just before each end

    @classmethod
    def of(cls, load: ExpectedLoad) -> _Rows:
        order = np.argsort(load.left)
        return cls(load.left[order], load.tokens[order])

    def _summed(self) -> Numbers:
        begun: Numbers = np.cumsum(self._begun[::-1])[::-1]
        return begun + np.arange(len(begun), 0, -1) * self._ends

    @property
    def last(self) -> float:
        """When the last of them ends."""
        return float(self._ends[-1]) if len(self._ends) else 0.0

    def full(self, room: float) -> float | None:
        """Return when they first hold more than there is room for; None if they never do."""
        first = int(np.argmax(self._needs > room))
        rows = len(self._ends) - first
        if rows < 2 or self._needs[first] <= room:
            return None
        return max(0.0, (room - float(self._begun[first:].sum())) / rows)

    def lose_shortest(self, now: float) -> tuple[float, float]:
        """Remove the row that has the fewest tokens, and return them, and what was left of it."""
        first = int(np.searchsorted(self._ends, now))
        at = first + int(np.argmin(self._begun[first:]))
        row = float(self._begun[at]) + now, float(self._ends[at]) - now
        self._ends, self._begun = np.delete(self._ends, at), np.delete(self._begun, at)
        self._needs = self._summed()
        return row

    def begin(self, now: float, tokens: float, left: float, load: ExpectedLoad) -> float:
        """Let another row begin once all fit to their ends, and return when that is."""
        while True:
            over = int(np.searchsorted(self._ends, now))
            self._ends, self._begun, self._needs = self._ends[over:], self._begun[over:], self._needs[over:]
            ends = self._ends
            end = now + left
            before = int(np.searchsorted(ends, end))
            own = float(self._begun[before:].sum()) + (len(ends) - before) * end + tokens + left
            if not len(ends):
                break
            if len(ends) >= load.max_rows or own > load.room:
                now = float(ends[0]) + _INSTANT
                continue
            # the later it begins, the fewer tokens it has when another row ends
            fits_at = self._needs[:before] + tokens + ends[:before] - load.room
            if not (fits_at > now).any():
                break
            now = max(now, float(np.minimum(fits_at, ends[:before]).max())) + _INSTANT
        self._needs[:before] += tokens - now + ends[:before]
        self._ends = np.insert(ends, before, end)
        self._begun = np.insert(self._begun, before, tokens - now)
        self._needs = np.insert(self._needs, before, own)
        return now


@dataclass(eq=False, order=False)
class _Free:
    """Tokens that no row holds, of one that has ended, or one that lost its pages and may find some again."""

    tokens: float


class _Lost(NamedTuple):
    """A row that has lost its pages; those that lost them first were admitted last, mostly, and are next."""

    number: int
    tokens: float
    left: float
    cached: _Free


def cost_of_greed(load: ExpectedLoad) -> float:
    """Return the steps until all have ended, and what is computed again, if each begins as soon as it fits."""
    return _Greed(load).cost()


class _Greed:
    def __init__(self, load: ExpectedLoad) -> None:
        self._load = load
        self._rows = dict(enumerate(zip(load.tokens.tolist(), load.left.tolist(), strict=True)))
        self._ends = [(end, number) for number, (_, end) in self._rows.items()]
        self._shortest = [(begun, -number) for number, (begun, _) in self._rows.items()]
        heapify(self._ends)
        heapify(self._shortest)
        self._begun = float(load.tokens.sum())
        waiting = zip(load.next_tokens.tolist(), load.next_left.tolist(), strict=True)
        self._waiting = deque(enumerate(waiting, start=len(self._rows)))
        self._lost: list[_Lost] = []
        self._free = deque([_Free(max(0.0, load.room - self._begun))])  # the least recently used first
        self._now = self._again = 0.0

    def cost(self) -> float:
        while self._rows or self._lost or self._waiting:
            self._admit()
            self._run()
        return self._now + self._again * self._load.weight / _AGAIN

    def _admit(self) -> None:
        while len(self._rows) < self._load.max_rows:
            if self._lost:
                number, (tokens, left) = self._lost[0].number, self._lost[0][1:3]
            elif self._waiting:
                number, (tokens, left) = self._waiting[0]
            else:
                return
            if self._rows and tokens > self._load.room - self._held:
                return
            missing = tokens
            if self._lost:
                cached = heappop(self._lost).cached
                missing -= min(tokens, cached.tokens)
                cached.tokens = 0.0
                self._again += missing
            else:
                self._waiting.popleft()
            self._take(missing)
            self._rows[number] = tokens - self._now, self._now + left
            heappush(self._ends, (self._now + left, number))
            heappush(self._shortest, (tokens - self._now, -number))
            self._begun += tokens - self._now

    @property
    def _held(self) -> float:
        return self._begun + len(self._rows) * self._now

    def _take(self, tokens: float) -> None:
        while self._free and tokens > 0:
            taken = min(tokens, self._free[0].tokens)
            self._free[0].tokens -= taken
            tokens -= taken
            if tokens > 0:
                self._free.popleft()

    def _run(self) -> None:
        """Go on until a row ends, or to the step in which one loses its pages."""
        while (end := self._ends[0])[1] not in self._rows or self._rows[end[1]][1] != end[0]:
            heappop(self._ends)
        full = (self._load.room - self._begun) / len(self._rows)
        if full >= end[0] or len(self._rows) == 1:
            self._go_on(end[0])
            heappop(self._ends)
            self._free.append(_Free(self._remove(end[1])[0]))
            return
        self._go_on(full)
        while (first := heappop(self._shortest)) and self._rows.get(-first[1], (None,))[0] != first[0]:
            pass
        number = -first[1]
        tokens, left = self._remove(number)
        cached = _Free(tokens)
        self._free.append(cached)
        heappush(self._lost, _Lost(number, tokens, left, cached))
        self._go_on(self._now + 1)

    def _go_on(self, until: float) -> None:
        if until > self._now:
            self._take(len(self._rows) * (until - self._now))
            self._now = until

    def _remove(self, number: int) -> tuple[float, float]:
        """End a row, and return its tokens and what is left of it."""
        begun, end = self._rows.pop(number)
        self._begun -= begun
        return begun + self._now, end - self._now
