"""The calls of ``generate`` that are timed. Shapes: B rows, T tokens in each prompt."""

from __future__ import annotations

import random
from dataclasses import dataclass

SAMPLING = {"temperature": 0.8, "top_k": 50, "top_p": 0.95}


@dataclass(frozen=True)
class Workload:
    """One call: ``batch`` prompts of ``prompt`` tokens, ``new`` tokens for each.

    Attributes:
        new: tokens generated for each row; no row ends earlier.
        sampled: drawn with ``SAMPLING``, or else the most likely ones.
    """

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
