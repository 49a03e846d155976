"""What a policy of chunks knows, and what it says."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from compiled_llm.engine.chunks.step_times import StepTimes


class ChunkState(ABC):
    """The state of a scheduler when prompts could run in the next step.

    Attributes:
        rows: how many requests go on by a token.
        most: tokens of prompts that a step may have.
        padding: tokens of these rows that a launch has beside those of prompts; 0 if rows have a launch of their own.
        times: how long steps took.
        step: counts the steps of the engine.
        begun: counts the requests that have begun to run.
    """

    rows: int
    most: int
    padding: int
    times: StepTimes
    step: int
    begun: int

    @property
    @abstractmethod
    def followed(self) -> bool:
        """Whether anybody reads tokens of these requests as they come, and does not wait for the ends."""

    @property
    @abstractmethod
    def left(self) -> int:
        """The tokens of all prompts that run or wait and are not computed; some may be in the prefix cache."""


class ChunkPolicy(Protocol):
    """A policy of chunks, with a memory of its own if it likes."""

    def plan(self, state: ChunkState) -> int:
        """Return how many tokens of prompts run in the next step: 1 to ``most``, so that they go on."""
        ...
