"""What is asked of a contender: how many prompts, how long they are, and how many new tokens each gets.

Shapes: B rows, T tokens in each prompt.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

SAMPLING = {"temperature": 0.8, "top_k": 50, "top_p": 0.95}


@dataclass(frozen=True)
class Workload:
    """One call: ``batch`` prompts of ``prompt`` tokens, ``new`` tokens for each.

    Attributes:
        batch: B.
        prompt: T.
        new: tokens generated for each row; no row ends earlier.
        sampled: drawn with ``SAMPLING``, or else the most likely ones.
    """

    batch: int
    prompt: int
    new: int
    sampled: bool = False

    def __post_init__(self) -> None:
        """Check every value.

        Raises:
            ValueError: a value is impossible; decode has a rate from two tokens on.
        """
        if self.batch < 1 or self.prompt < 1:
            raise ValueError(f"batch {self.batch}, prompt {self.prompt}: both must be at least 1")
        if self.new < 2:
            raise ValueError(f"{self.new} new tokens: at least 2 are needed, because decode is what follows the first")

    @property
    def context(self) -> int:
        """How many tokens a row has in the middle of decode."""
        return self.prompt + self.new // 2

    @property
    def decoding(self) -> str:
        """``greedy`` or ``sampled``."""
        return "sampled" if self.sampled else "greedy"

    def __str__(self) -> str:
        return f"batch {self.batch}, {self.prompt} + {self.new} tokens, {self.decoding}"

    def prompts(self, vocabulary: int, number: int) -> list[list[int]]:
        """Return ``[B][T]`` random token ids, different for each ``number``, so that no prefix cache ever hits."""
        generator = random.Random(f"{self.batch} {self.prompt} {number}")
        return [[generator.randrange(1, vocabulary) for _ in range(self.prompt)] for _ in range(self.batch)]


def workloads(
    batches: Sequence[int], prompts: Sequence[int], contexts: Sequence[int], new: Sequence[int], sampled: Sequence[bool]
) -> list[Workload]:
    """Return every combination once.

    Args:
        batches: batch sizes.
        prompts: prompt lengths.
        contexts: further prompt lengths, said as the context in the middle of decode.
        new: output lengths.
        sampled: whether tokens are sampled.

    Raises:
        ValueError: a length is impossible, or a context too short for its output.
    """
    found: dict[Workload, None] = {}
    for length, draw in itertools.product(new, sampled):
        for context in contexts:
            if context <= length // 2:
                raise ValueError(f"context {context}: with {length} new tokens it is at least {length // 2 + 1}")
        lengths = [*prompts, *(context - length // 2 for context in contexts)]
        for prompt, batch in itertools.product(lengths, batches):
            found[Workload(batch, prompt, length, draw)] = None
    return list(found)
