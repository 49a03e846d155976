"""The log-probabilities of one request's tokens, and nothing of the rows that ran beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from struct import Struct
from typing import NamedTuple


class TokenScores(NamedTuple):
    """Of the token at one place.

    Attributes:
        chosen: its log-probability.
        rank: 1 and how many tokens are likelier.
        values: log-probabilities of the likeliest tokens, in descending order.
        tokens: whose they are.
    """

    sampled: float
    rank: int
    values: tuple[float, ...]
    tokens: tuple[int, ...]


class Scores:
    """The scores of some tokens, one after the other, in one block of bytes.

    A view of what a step has computed would keep the numbers of all rows alive, and an object for each token would be
    one that the garbage collector looks at, of millions: a full collection stops the loop for tenths of a second.
    """

    __slots__ = ("_numbers", "_size")

    def __init__(self) -> None:
        """Begin with no token's."""
        self._numbers = bytearray()
        self._size = 1  # of one token's, in bytes, once there is one

    def append(self, numbers: bytes) -> None:
        """Keep the next token's, an entry of ``ScoredTokens.packed``; all have as many of the likeliest tokens."""
        self._size = len(numbers)  # first: other threads read as many as there are bytes
        self._numbers += numbers

    def extend(self, numbers: Sequence[bytes]) -> None:
        """Keep those of the next tokens."""
        for each in numbers:
            self.append(each)

    def __len__(self) -> int:
        """Of how many tokens they are known."""
        return len(self._numbers) // self._size

    def __getitem__(self, index: int) -> TokenScores:
        """Return those of one token that are known; ``index`` is not negative."""
        num_logprobs = self._size // 8 - 1
        sampled, rank, *rest = _form(num_logprobs).unpack_from(self._numbers, index * self._size)
        return TokenScores(sampled, rank, tuple(rest[:num_logprobs]), tuple(rest[num_logprobs:]))

    def between(self, start: int, end: int) -> Iterator[TokenScores]:
        """Yield those of some tokens, as far as they are known."""
        return map(self.__getitem__, range(start, min(end, len(self))))


@lru_cache(maxsize=64)
def _form(num_logprobs: int) -> Struct:
    """Return how the numbers of one token lie, with so many of the likeliest ones."""
    return Struct(f"=fi{num_logprobs}f{num_logprobs}i")
