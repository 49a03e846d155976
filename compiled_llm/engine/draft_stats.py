"""How many guessed tokens were right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class DraftStats(NamedTuple):
    """What speculation has come to.

    Attributes:
        drafts: how often tokens were guessed for a request in a step.
        draft_tokens: how many tokens that were.
        accepted_tokens: how many of them the model has said as well.
        accepted_per_position: of each of the guesses of a step, the first one first, how often it was accepted.
    """

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()

    def plus(self, other: DraftStats) -> DraftStats:
        """Return both together."""
        drafts, draft_tokens, accepted_tokens = (one + more for one, more in zip(self[:3], other[:3], strict=True))
        return DraftStats(drafts, draft_tokens, accepted_tokens, self._at_each(other))

    def _at_each(self, other: DraftStats) -> tuple[int, ...]:
        few, many = sorted((self.accepted_per_position, other.accepted_per_position), key=len)
        return tuple(count + more for count, more in zip(many, [*few, *[0] * len(many)], strict=False))

    @classmethod
    def of(cls, offered: Sequence[int], accepted: Sequence[int], positions: int) -> DraftStats:
        """Count those of a step, of which each row was offered some, and has accepted the first ones."""
        per_position = tuple(sum(count > at for count in accepted) for at in range(positions))
        return cls(sum(map(bool, offered)), sum(offered), sum(accepted), per_position)
