"""What one contender did in ``bench graphs``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from compiled_llm.commands.bench.timing import Percentiles


@dataclass(frozen=True)
class GraphTimes:
    """One contender that got requests one after the other, its CUDA graphs being there or not.

    Attributes:
        contender: its name.
        recordings: ``prepared`` (all were recorded before, or there is nothing to record), ``on demand`` (this is the
            first request of its length) or ``evicted`` (only a few may exist, and others have taken its place).
        prompt: tokens of each prompt.
        new: tokens of each answer.
        first_s: from sending each request to its first token, in seconds.
        between_s: from each token of an answer to the next.
        running_s: the longest that a request in the midst of its answer waits for a token while one of these comes,
            once for each; empty if that was not measured.
        ready_s: what it took until it could be measured, in seconds.
    """

    contender: str
    recordings: str
    prompt: int
    new: int
    first_s: list[float]
    between_s: Percentiles
    running_s: list[float]
    ready_s: float

    @property
    def first(self) -> Percentiles:
        """Time to first token."""
        return Percentiles.of(self.first_s)

    @property
    def running(self) -> Percentiles | None:
        """The longest wait of a request that runs meanwhile."""
        return Percentiles.of(self.running_s) if self.running_s else None

    def figures(self) -> dict[str, Any]:
        """What is computed from these."""
        running = self.running
        return {"first_s": asdict(self.first), "running_s": None if running is None else asdict(running)}


@dataclass(frozen=True)
class GraphUse:
    """The CUDA graphs of one contender, after its requests.

    Attributes:
        contender: its name.
        recordings: as in ``GraphTimes``.
        ready: how many there are.
        nbytes: device memory that they take.
        captures: how many were captured, warming up included.
        evictions: how many had to make room for others.
        capture_s: how long capturing took; None if the contender does not say.
    """

    contender: str
    recordings: str
    ready: int
    nbytes: int
    captures: int
    evictions: int
    capture_s: float | None

    @property
    def seconds_a_capture(self) -> float | None:
        """How long one took, on average."""
        return None if self.capture_s is None or not self.captures else self.capture_s / self.captures

    def figures(self) -> dict[str, Any]:
        """What is computed from these."""
        return {"mib": self.nbytes / 2**20, "seconds_a_capture": self.seconds_a_capture}
