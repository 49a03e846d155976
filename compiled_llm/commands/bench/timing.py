"""The times that are taken, and how they are summed up, for every contender. Shapes: B rows, T tokens a prompt."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

_RUNS_OF_A_PERCENTILE = 100  # with fewer runs, the 99th percentile would be the worst one
SAMPLING = {"temperature": 0.8, "top_k": 50, "top_p": 0.95}


@dataclass(frozen=True)
class Workload:
    """One call: ``batch`` prompts of ``prompt`` tokens, exactly ``new`` tokens for each, sampled or greedy."""

    batch: int
    prompt: int
    new: int
    sampled: bool = False

    def __post_init__(self) -> None:
        if self.batch < 1 or self.prompt < 1:
            raise ValueError(f"batch {self.batch}, prompt {self.prompt}: both must be at least 1")
        if self.new < 2:
            raise ValueError(f"{self.new} new tokens: at least 2 are needed, because decode is what follows the first")

    @property
    def context(self) -> int:
        """How many tokens a row has in the middle of decode."""
        return self.prompt + self.new // 2

    def __str__(self) -> str:
        decoding = "sampled" if self.sampled else "greedy"
        return f"batch {self.batch}, {self.prompt} + {self.new} tokens, {decoding}"

    def prompts(self, vocabulary: int, number: int) -> list[list[int]]:
        """Return ``[B][T]`` random token ids, different for each ``number``, so that no prefix cache ever hits."""
        generator = random.Random(f"{self.batch} {self.prompt} {number}")
        return [[generator.randrange(1, vocabulary) for _ in range(self.prompt)] for _ in range(self.batch)]


class CallTiming(NamedTuple):
    """One call, in seconds: to the first token of every row on the host, and to its end."""

    first: float
    total: float

    def checked(self) -> CallTiming:
        """Return the timing; raises ValueError if decode took no time."""
        if not 0 < self.first < self.total:
            raise ValueError(f"first token after {self.first:.6f} s of {self.total:.6f} s: measure more new tokens")
        return self


class Spread(NamedTuple):
    """The best and the median of some runs; of times also the 99th percentile, if there were runs enough."""

    best: float
    median: float
    runs: int
    p99: float | None = None

    @classmethod
    def of_times(cls, seconds: Iterable[float]) -> Spread:
        values = sorted(seconds)
        p99 = values[math.ceil(0.99 * len(values)) - 1] if len(values) >= _RUNS_OF_A_PERCENTILE else None
        return cls(values[0], statistics.median(values), len(values), p99)

    @classmethod
    def of_rates(cls, rates: Iterable[float]) -> Spread:
        values = list(rates)
        return cls(max(values), statistics.median(values), len(values))


class BenchPercentiles(NamedTuple):
    """The middle and the end of a distribution of times, in seconds; ``most`` is the longest."""

    p50: float
    p99: float
    most: float

    @classmethod
    def from_times(cls, seconds: Iterable[float]) -> BenchPercentiles:
        values = sorted(seconds)
        return cls(*(values[math.ceil(share * len(values)) - 1] for share in (0.5, 0.99, 1.0)))


class TokenClock:
    """A streamer that keeps the times of tokens, by ``time.perf_counter``; ``generate`` puts the prompt first."""

    leaves_model_alone = True  # so that steps are not checked for changes after it

    def __init__(self) -> None:
        self.times: list[float] = []
        self._has_prompt = False

    def put(self, value: object) -> None:
        if self._has_prompt:
            self.times.append(time.perf_counter())
        self._has_prompt = True

    def end(self) -> None: ...


def timed(generate: Callable[[], object], clock: TokenClock, new: int, synchronize: Callable[[], object]) -> CallTiming:
    """Time one call, whose streamer is the fresh ``clock``; RuntimeError if other than ``new`` tokens came."""
    synchronize()
    start = time.perf_counter()
    generate()
    synchronize()
    total = time.perf_counter() - start
    if len(clock.times) != new:
        raise RuntimeError(f"{len(clock.times)} tokens came instead of {new}")
    return CallTiming(clock.times[0] - start, total).checked()
