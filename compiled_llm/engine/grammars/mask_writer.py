"""Writes masks of allowed tokens for many answers at once, and advances their grammars."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import xgrammar

_SOON = 6e-4
"""Seconds in which one thread may fill the masks of a step: to start others takes nearly as long."""
_FEW = 4
"""Answers whose masks show how long those of the others take."""
_MEASURED = 16
"""Steps after which that is measured again."""
_THREADS = max(1, min(4, len(os.sched_getaffinity(0)) // 2 if hasattr(os, "sched_getaffinity") else 1))


class MaskWriter:
    """A writer of the masks of many answers, in one thread or, if that takes long, in several."""

    def __init__(self) -> None:
        self._fillers: dict[int, xgrammar.BatchGrammarMatcher] = {}  # by how many threads they have
        self._each = 0.0  # seconds that a mask has taken lately
        self._steps = 0

    def fill(self, matchers: Sequence[xgrammar.GrammarMatcher], masks: NDArray[np.int32]) -> None:
        """Write which tokens grammars allow next into ``masks`` ``[n, words]``, whose bits of no token are zero."""
        first = self._measure(matchers, masks) if self._steps % _MEASURED == 0 else 0
        self._steps += 1
        if first < len(matchers):
            soon = (len(matchers) - first) * self._each < _SOON
            self._fill(1 if soon else _THREADS, matchers[first:], masks[first:])

    def _measure(self, matchers: Sequence[xgrammar.GrammarMatcher], masks: NDArray[np.int32]) -> int:
        """Fill the first few masks, and return how many."""
        few, start = min(_FEW, len(matchers)), time.perf_counter()
        self._fill(1, matchers[:few], masks[:few])
        self._each = (time.perf_counter() - start) / max(1, few)
        return few

    def _fill(self, threads: int, matchers: Sequence[xgrammar.GrammarMatcher], masks: NDArray[np.int32]) -> None:
        if threads not in self._fillers:
            from xgrammar import BatchGrammarMatcher

            self._fillers[threads] = BatchGrammarMatcher(max_threads=threads)
        self._fillers[threads].batch_fill_next_token_bitmask(list(matchers), masks)

    @staticmethod
    def accept(matchers: Sequence[xgrammar.GrammarMatcher], tokens: Sequence[int]) -> Sequence[bool]:
        """Advance grammars by a token each, in one call; False for each that does not allow it."""
        from xgrammar import BatchGrammarMatcher

        accepted: list[bool] = BatchGrammarMatcher.batch_accept_token(list(matchers), list(tokens))
        return accepted
