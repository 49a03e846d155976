"""Log-probabilities as users read them, by token id."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TypeVar, overload

from compiled_llm.engine.logprobs.scores import Scores, TokenScores
from compiled_llm.requests.outputs import Logprob

T = TypeVar("T")


class _Entries(Sequence[T]):
    """Entries of consecutive tokens, made when they are read: millions would take seconds."""

    @abstractmethod
    def _entry(self, place: int) -> T:
        """Return the entry of one token."""

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> list[T]: ...

    def __getitem__(self, index: int | slice) -> T | list[T]:
        """Return a token's entries, by token id; of a slice, a list of them."""
        if isinstance(index, slice):
            return [self._entry(place) for place in range(*index.indices(len(self)))]
        return self._entry(range(len(self))[index])

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self)} tokens>"


class Logprobs(_Entries[dict[int, Logprob]]):
    """Each token's entries: its own first, then the most likely ones."""

    def __init__(self, scores: Scores, tokens: Sequence[int], most: int, start: int = 0) -> None:
        """Refer to scores of tokens from the one at ``start`` on, and of ``most`` of the most likely ones."""
        self._scores = scores
        self._tokens = list(tokens[: max(0, len(scores) - start)])
        self._most = most
        self._start = start

    def __len__(self) -> int:
        return len(self._tokens)

    def _entry(self, place: int) -> dict[int, Logprob]:
        return logprobs_of(self._scores[self._start + place], self._tokens[place], self._most)


class PromptLogprobs(_Entries[dict[int, Logprob] | None]):
    """The entries of a prompt's tokens; None in place of the first ones, which have none."""

    def __init__(self, scored: Logprobs, without: int) -> None:
        """``scored`` are the entries after the first ``without`` tokens."""
        self._scored, self._without = scored, without

    def __len__(self) -> int:
        return self._without + len(self._scored)

    def _entry(self, place: int) -> dict[int, Logprob] | None:
        return None if place < self._without else self._scored[place - self._without]


def logprobs_of(scores: TokenScores, token: int, most: int) -> dict[int, Logprob]:
    """Return the entries of one place: the sampled ``token`` first, then the ``most`` likely ones."""
    found = {token: Logprob(scores.sampled, scores.rank)}
    rank, before = 1, None
    for place, value in enumerate(scores.values[:most]):
        rank, before = (rank if value == before else place + 1), value
        found.setdefault(scores.tokens[place], Logprob(value, rank))
    return found
