"""Log-probabilities as users read them, by token id."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from compiled_llm.engine.logprobs.scores import Scores, TokenScores
from compiled_llm.requests.outputs import Logprob

Others = int | Sequence[int]
"""How many of the most likely tokens have entries, or which tokens."""


class Logprobs(Sequence[Any]):
    """Each token's entries, its own first, then those of others: made when read, since millions take seconds."""

    def __init__(self, scores: Scores, tokens: Sequence[int], others: Others, start: int = 0, without: int = 0) -> None:
        """Refer to scores.

        Args:
            scores: of these tokens, or of fewer or more.
            tokens: from the one at ``start`` on.
            others: of how many of the most likely tokens, or of which tokens.
            start: how many tokens before them have scores, too.
            without: how many places before theirs have None.
        """
        self._scores, self._others, self._start, self._without = scores, others, start, without
        self._tokens = list(tokens[: max(0, len(scores) - start)])

    def __len__(self) -> int:
        return self._without + len(self._tokens)

    def __getitem__(self, index: int | slice) -> Any:
        """Return a token's entries, by token id; of a slice, a list of them."""
        if isinstance(index, slice):
            return [self._entry(place) for place in range(*index.indices(len(self)))]
        return self._entry(range(len(self))[index])

    def sampled(self) -> list[float]:
        """Return the log-probabilities of the tokens themselves, of all that have some."""
        return self._scores.sampled(self._start)[: len(self._tokens)]

    def _entry(self, place: int) -> dict[int, Logprob] | None:
        if (at := place - self._without) < 0:
            return None
        scores, token = self._scores[self._start + at], self._tokens[at]
        if isinstance(self._others, int):
            return logprobs_of(scores, token, self._others)
        return named_logprobs_of(scores, token, self._others)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self)} tokens>"


def logprobs_of(scores: TokenScores, token: int, most: int) -> dict[int, Logprob]:
    """Return the entries of one place: the sampled ``token`` first, then the ``most`` likely ones."""
    found = {token: Logprob(scores.sampled, scores.rank)}
    rank, before = 1, None
    for place, value in enumerate(scores.values[:most]):
        rank, before = (rank if value == before else place + 1), value
        found.setdefault(scores.others[place], Logprob(value, rank))
    return found


def named_logprobs_of(scores: TokenScores, token: int, named: Sequence[int]) -> dict[int, Logprob]:
    """Return the entries of one place: the sampled ``token`` first, then the ``named`` ones, in their order."""
    found = {token: Logprob(scores.sampled, scores.rank)}
    for other, value, rank in zip(named, scores.values, scores.others, strict=False):
        found.setdefault(other, Logprob(value, rank))
    return found
