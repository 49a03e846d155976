"""What takes part: a contender opens a session, and the session answers requests.

A new one is a file in this folder with a class of these two protocols' shape, and a line in ``contenders.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from compiled_llm.commands.bench.contender import Participant, Setup
from compiled_llm.commands.bench.serving.workloads import Asked


@dataclass(frozen=True)
class Served:
    """One pass over the requests.

    Attributes:
        seconds: from the begin until the last answer was complete.
        counts: what happened meanwhile, as far as the contender says: ``steps``, ``preemptions``, ``cached tokens``
            (of prompts, not computed).
        times: when each token of each request came, in seconds from the begin; empty if all requests come at once.
    """

    seconds: float
    counts: dict[str, int] = field(default_factory=dict)
    times: list[list[float]] = field(default_factory=list)


class ServingSession(Protocol):
    """A contender that has its model loaded.

    Attributes:
        versions: of packages that this process does not have.
        vocabulary: how many token ids there are.
        profiled: whether the device is to be watched in one more pass; it has to run in this process.
    """

    versions: dict[str, str]
    vocabulary: int
    profiled: bool

    def prepare(self) -> None:
        """Compile and record what any requests need; a pass over requests like those to come follows."""

    def run(self, asked: Sequence[Asked], temperature: float) -> Served:
        """Answer requests when they arrive, each with as many tokens as it asks for."""
        ...


class ServingContender(Participant, Protocol):
    """Something that answers requests."""

    def opened(self, setup: Setup) -> AbstractContextManager[ServingSession]:
        """Load the model for the block."""
        ...


def check_answers(lengths: Sequence[int], asked: Sequence[Asked]) -> None:
    """Check that each answer is as long as was asked for.

    Raises:
        RuntimeError: one is not.
    """
    for number, (length, request) in enumerate(zip(lengths, asked, strict=True)):
        if length != request.new:
            raise RuntimeError(f"request {number}: {length} tokens came instead of {request.new}")
