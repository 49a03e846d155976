"""The log-probabilities of one request's tokens, and nothing of other rows of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from struct import Struct
from typing import NamedTuple


class TokenScores(NamedTuple):
    """The scores of one token."""

    sampled: float  # its log-probability
    rank: int  # 1 plus the number of more likely tokens
    values: tuple[float, ...]  # log-probabilities of the most likely tokens, in descending order, or of named ones
    others: tuple[int, ...]  # the most likely tokens; the ranks of named ones


class Scores:
    """The scores of some tokens, one after the other, in one block of bytes."""

    # A view of what a step has computed would keep the numbers of all rows alive, and an object for each token would be
    # one that the garbage collector looks at, of millions: a full collection stops the loop for tenths of a second.

    __slots__ = ("_numbers", "_size")

    def __init__(self) -> None:
        self._numbers = bytearray()
        self._size = 1  # of one token's, in bytes, once there is one

    def append(self, numbers: bytes) -> None:
        """Keep the next token's, an entry of ``ScoredTokens.packed``; all have as many of other tokens."""
        self._size = len(numbers)  # first: other threads read as many as there are bytes
        self._numbers += numbers

    def extend(self, numbers: Sequence[bytes]) -> None:
        for each in numbers:
            self.append(each)

    def __len__(self) -> int:
        return len(self._numbers) // self._size

    @property
    def num_logprobs(self) -> int:
        """Of how many other tokens each has; there is one."""
        return self._size // 8 - 1

    def part(self, start: int, end: int) -> Scores:
        """Return a copy of those of some tokens, which are known."""
        part = Scores()
        part._size, part._numbers = self._size, self._numbers[start * self._size : end * self._size]
        return part

    def packed(self, num_logprobs: int) -> list[bytes]:
        """Return each token's as ``append`` takes them, with those of so many other tokens or fewer."""
        form, each = _form(num_logprobs), (self[index] for index in range(len(self)))
        return [
            form.pack(token.sampled, token.rank, *token.values[:num_logprobs], *token.others[:num_logprobs])
            for token in each
        ]

    def sampled(self, start: int = 0) -> list[float]:
        """Return the log-probabilities of the tokens themselves, from one on."""
        numbers = self._numbers[start * self._size : len(self) * self._size]
        return [token[0] for token in _form(self.num_logprobs).iter_unpack(numbers)] if numbers else []

    def __getitem__(self, index: int) -> TokenScores:
        """Return those of one token that are known; ``index`` is not negative."""
        num_logprobs = self.num_logprobs
        sampled, rank, *rest = _form(num_logprobs).unpack_from(self._numbers, index * self._size)
        return TokenScores(sampled, rank, tuple(rest[:num_logprobs]), tuple(rest[num_logprobs:]))


@lru_cache(maxsize=64)
def _form(num_logprobs: int) -> Struct:
    """Return the layout of one token's numbers."""
    return Struct(f"=fi{num_logprobs}f{num_logprobs}i")
