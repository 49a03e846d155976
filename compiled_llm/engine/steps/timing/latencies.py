"""How long requests have waited: lately, sorted when asked for, not at each step, and all of them by their length."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from compiled_llm.engine.steps.request import Request
from compiled_llm.requests.histogram import BUCKETS, Histogram

WINDOW = 1000
"""How many requests, or steps, count as lately."""


class Latency(NamedTuple):
    """Percentiles of waits, in seconds: half of them were at most ``p50`` long, 99 of 100 at most ``p99``."""

    p50: float
    p99: float


class Waits:
    """The waits of one kind; one thread adds some, any may ask."""

    def __init__(self) -> None:
        self._latest: deque[Mapping[float, int]] = deque(maxlen=WINDOW)
        self._counts = [0] * (len(BUCKETS) + 1)
        self._seconds = 0.0

    def add(self, counts: Mapping[float, int]) -> None:
        """Add waits of a request or a step: seconds, and how many there are of that length."""
        self._latest.append(counts)
        for seconds, count in counts.items():
            self._counts[bisect_left(BUCKETS, seconds)] += count
            self._seconds += seconds * count

    def histogram(self) -> Histogram:
        return Histogram(tuple(self._counts), self._seconds)

    def latency(self) -> Latency | None:
        """Return percentiles of the latest ones, or None if there are none."""
        counts = Counter[float]()
        for some in tuple(self._latest):  # a copy that is made in one go, since the loop goes on
            counts.update(some)
        if not counts:
            return None
        seconds = sorted(counts)
        up_to = list(accumulate(map(counts.__getitem__, seconds)))
        p50, p99 = (seconds[bisect_left(up_to, share * up_to[-1])] for share in (0.5, 0.99))
        return Latency(p50, p99)


class Latencies:
    """The waiting times of requests: until they first ran, until their first token, and from one to the next."""

    def __init__(self) -> None:
        self.queue, self.first_token, self.inter_token = Waits(), Waits(), Waits()
        # The requests whose tokens were read last, and when: mostly the same as before, which waited equally long.
        self._group: list[Request] = []
        self._read_at = 0.0

    def read(self, requests: list[Request], now: float) -> None:
        """Note that a step's tokens were read; ``now`` is on ``time.monotonic``'s clock."""
        if not requests:
            return
        before, self._read_at = self._read_at, now
        if requests == self._group:
            self.inter_token.add({now - before: len(requests)})
            return
        for request in self._group:
            request.last_token = before
        self._group = requests
        since = Counter(request.last_token for request in requests)
        if since.pop(None, 0):
            self._read_first([request for request in requests if request.last_token is None], now)
        if since:
            self.inter_token.add({now - last: count for last, count in since.items() if last is not None})

    def _read_first(self, requests: Sequence[Request], now: float) -> None:
        for request in requests:
            request.first_token = now
            self.first_token.add({now - request.submitted: 1})
            if request.admitted is not None:
                self.queue.add({request.admitted - request.submitted: 1})
