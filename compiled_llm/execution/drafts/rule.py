"""How many tokens rows feed in next: the number by which they are expected to be fastest."""

# It follows from counts alone, never from clocks: a call that is repeated gives the same tokens by the same steps.

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

from compiled_llm.execution.drafts.costs import Costs
from compiled_llm.kvcache.row import Row

_RIGHT, _WEIGHT = 0.4, 1.0
"""How often drafts of a row are right before anything is known, and how much that weighs, in drafts."""

_KEPT = 0.9
"""What of earlier drafts still counts after a step."""

_FIRST_PAUSE, _LONGEST_PAUSE = 16, 256
"""Steps of one token until the first trial, and between trials after many that failed."""

_SUCCESS = 2.0
"""Drafts of a row that have to count before a trial has succeeded."""


class _Tally:
    """How many drafts of a row were right, and how many runs of them ended early."""

    right = ended = 0.0

    def note(self, offered: int, accepted: int, asked: int) -> None:
        """Count a step that could have had ``asked`` drafts; none that was offered counts as one that was wrong."""
        self.right = self.right * _KEPT + accepted
        self.ended = self.ended * _KEPT + (accepted < max(1, min(asked, offered) or 1))

    @property
    def share(self) -> float:
        return (_RIGHT * _WEIGHT + self.right) / (_WEIGHT + self.right + self.ended)


class Rule:
    """The choice of how many tokens each row feeds in, from how many drafts have counted so far."""

    def __init__(self, sizes: Callable[[int], Sequence[int]], costs: Costs) -> None:
        """Choose among the ``sizes`` that there are for a number of rows, ascending from 1."""
        self._sizes, self._costs = sizes, costs
        self._tallies: weakref.WeakKeyDictionary[Row, _Tally] = weakref.WeakKeyDictionary()
        self._rows: Sequence[Row] = ()
        self._size, self._known = 1, False
        self._left, self._pause, self._counted = 0, _FIRST_PAUSE, 0.0

    def size(self, rows: Sequence[Row]) -> int:
        """Return how many tokens each row feeds in next."""
        if self._left:
            self._left -= 1
            if self._left:
                return 1
            self._tallies.clear()  # a trial
            self._known, self._counted = True, 0.0
            self._rows, self._size = rows, min(self._sizes(len(rows))[1:], default=1)
        elif not self._known or rows is not self._rows:
            self._choose(rows)
        return self._size

    def note(self, rows: Sequence[Row], new_tokens: int, offered: Sequence[int], accepted: Sequence[int]) -> None:
        """Note how many drafts each row of a step of q tokens had, and how many counted."""
        if self._left:
            return  # launched before it was given up
        tallies = self._tallies
        for row, had, counted in zip(rows, offered, accepted, strict=True):
            tally = tallies.get(row)
            if tally is None:
                tally = tallies[row] = _Tally()
            tally.note(had, counted, new_tokens - 1)
        self._counted += sum(accepted) / len(rows)
        if self._counted >= _SUCCESS:
            self._pause = _FIRST_PAUSE
        self._known = False

    def _choose(self, rows: Sequence[Row]) -> None:
        self._rows, self._known = rows, True
        shares = [tally.share if (tally := self._tallies.get(row)) is not None else _RIGHT for row in rows]
        count = len(rows)

        def speed(size: int) -> float:
            """Tokens in the time of a step of one token each."""
            return sum([_expected(share, size) for share in shares]) / self._costs.of(size, count)

        self._size = max(self._sizes(count), key=speed)
        if self._size == 1:
            self._left, self._pause = self._pause, min(_LONGEST_PAUSE, 2 * self._pause)


def _expected(share: float, size: int) -> float:
    """Return how many of ``size`` tokens count if each draft is right with a probability of ``share``."""
    return (1 - share**size) / (1 - share)
