"""Waits of requests, counted by their length."""

from __future__ import annotations

from typing import NamedTuple

BUCKETS = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
"""The longest wait in seconds of each bucket of a histogram; another one has longer ones."""


class Histogram(NamedTuple):
    """A count of waits by their length, and their ``seconds`` together.

    Attributes:
        counts: those up to each of ``BUCKETS`` and longer than the one before it; then those longer than all.
    """

    counts: tuple[int, ...] = (0,) * (len(BUCKETS) + 1)
    seconds: float = 0.0

    def plus(self, other: Histogram) -> Histogram:
        """Return the waits of both."""
        counts = tuple(map(sum, zip(self.counts, other.counts, strict=True)))
        return Histogram(counts, self.seconds + other.seconds)


NO_WAITS = Histogram()
