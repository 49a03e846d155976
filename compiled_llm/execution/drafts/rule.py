"""How many drafts each row may have, and how many tokens rows feed in next: that by which they should be fastest."""

# It follows from counts alone, never from clocks: a call that is repeated gives the same tokens by the same steps.
# No function is called for each row: this is part of each step.

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

_REVIEW = 16
"""Steps with drafts after which the rows' own limits follow what has counted: the device has to be told of them."""

_UNLIKELY, _HOPELESS = 0.01, 0.06
"""How likely the last draft of a row is right at least; and any draft of one that is to have some."""


class _Tally:
    """The drafts of a row.

    Attributes:
        right: how many were right, the latest counting most.
        ended: how many runs of them ended early.
        share: how often one is right, by these two.
        most: how many it may have, of the last review.
        pause: for how many reviews it has none, once it has none; ``left``, how many of them are left.
    """

    __slots__ = "ended", "left", "most", "pause", "right", "share"

    def __init__(self, most: int) -> None:
        self.begin(most)

    def begin(self, most: int) -> None:
        self.right, self.ended, self.share = 0.0, 0.0, _RIGHT
        self.most, self.pause, self.left = most, 1, 0


class Rule:
    """The choice of how many tokens rows feed in, from how many drafts have counted so far."""

    # What a row has as its limit costs nothing in a step that drafts for others; a row without hope is not looked up.

    def __init__(
        self,
        sizes: Callable[[int], Sequence[int]],
        costs: Costs,
        most: int = 7,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """Choose among the ``sizes`` that there are for a number of rows, ascending from 1.

        Args:
            most: how many drafts a row may have.
            changed: is called when the ``limit`` of a row has changed.
        """
        self._sizes_of, self._costs, self._most, self._changed = sizes, costs, most, changed
        self._tallies: weakref.WeakKeyDictionary[Row, _Tally] = weakref.WeakKeyDictionary()
        # the rows that were asked about last, and those of the step that was noted last, each with their tallies
        self._asked: tuple[Sequence[Row], list[_Tally]] = (), []
        self._noted: tuple[Sequence[Row], list[_Tally]] = (), []
        self._sizes: list[tuple[int, float]] = []  # of those that were asked about, with their costs
        self._size, self._known = 1, False
        self._left, self._pause, self._counted, self._steps = 0, _FIRST_PAUSE, 0.0, 0

    def limit(self, row: Row) -> int:
        """Return how many drafts of a row may count in a step."""
        tally = self._tallies.get(row)
        return self._most if tally is None else tally.most

    def size(self, rows: Sequence[Row]) -> int:
        """Return how many tokens each row feeds in next."""
        if self._left:
            self._left -= 1
            if self._left:
                return 1
            self._try(rows)
        elif not self._known or rows is not self._asked[0]:
            self._choose(rows)
        return self._size

    def note(self, rows: Sequence[Row], new_tokens: int, offered: Sequence[int], accepted: Sequence[int]) -> None:
        """Note how many drafts each row of a step of q tokens had, and how many counted."""
        if self._left:
            return  # launched before it was given up
        if rows is not self._noted[0]:
            self._noted = rows, self._tallies_of(rows)
        counted = 0
        for tally, had, right in zip(self._noted[1], offered, accepted, strict=True):
            if tally.most:  # none that was offered counts as one that was wrong
                counted += right
                tally.right = tally.right * _KEPT + right
                tally.ended = tally.ended * _KEPT + (right < (had or 1))
                tally.share = (_RIGHT * _WEIGHT + tally.right) / (_WEIGHT + tally.right + tally.ended)
        self._counted += counted / len(rows)
        if self._counted >= _SUCCESS:
            self._pause = _FIRST_PAUSE
        self._known = False
        self._steps += 1
        if self._steps % _REVIEW == 0:
            self._review()

    def _tallies_of(self, rows: Sequence[Row]) -> list[_Tally]:
        return [self._tallies.setdefault(row, _Tally(self._most)) for row in rows]

    def _choose(self, rows: Sequence[Row]) -> None:
        if rows is not self._asked[0]:
            self._ask(rows)
        self._known, best = True, 0.0
        for size, cost in self._sizes:
            tokens = 0.0  # as are expected
            for tally in self._asked[1]:
                share = tally.share
                tokens += (1 - share ** min(size, tally.most + 1)) / (1 - share)
            if tokens > best * cost:
                self._size, best = size, tokens / cost
        if self._size == 1:
            self._left = self._pause
            if len(self._sizes) > 1:
                self._pause = min(_LONGEST_PAUSE, 2 * self._pause)

    def _ask(self, rows: Sequence[Row]) -> None:
        """Look at other rows, or anew at which sizes there are."""
        self._asked = rows, self._tallies_of(rows)
        self._sizes = [(size, self._costs.of(size, len(rows))) for size in self._sizes_of(len(rows))]

    def _try(self, rows: Sequence[Row]) -> None:
        """Begin a trial: all rows have drafts again, as few as there can be."""
        changed = any(tally.most < self._most for tally in self._tallies.values())
        for tally in self._tallies.values():
            tally.begin(self._most)
        self._ask(rows)
        self._known, self._counted = True, 0.0
        if len(self._sizes) > 1:
            self._size = self._sizes[1][0]
        else:  # no other is there yet
            self._size, self._left = 1, self._pause
        if changed:
            self._changed()

    def _review(self) -> None:
        """Let the rows' limits follow what has counted, and look anew at which sizes there are."""
        changed = False
        for tally in self._tallies.values():
            before = tally.most
            if not before:
                tally.left -= 1
                if not tally.left:  # a trial of this row alone
                    tally.most, tally.right, tally.ended, tally.share = 1, 0.0, 0.0, _RIGHT
            else:
                tally.most = self._limit_at(tally.share)
                if not tally.most:
                    tally.left, tally.pause = tally.pause, min(_LONGEST_PAUSE // _REVIEW, 2 * tally.pause)
                elif tally.right >= _SUCCESS:
                    tally.pause = 1
            changed |= tally.most != before
        self._asked = (), []
        if changed:
            self._changed()

    def _limit_at(self, share: float) -> int:
        """Return how many drafts a row may have of which so many are right."""
        if share < _HOPELESS:
            return 0
        return next((k for k in range(self._most, 1, -1) if share**k >= _UNLIKELY), 1)
