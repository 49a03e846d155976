"""Admission by the most pages that rows will hold at one time."""

from __future__ import annotations

import numpy as np

from compiled_llm.engine.admission.lengths import drawn
from compiled_llm.engine.admission.state import AdmissionState, Counts, joined

_DRAWS = 4
"""Sets of lengths for which all has to fit."""


class Peak:
    """A policy by which a request begins if the pages of all rows are likely to fit until each has ended.

    Rows end one after the other, and give their pages back; what is left of each is drawn from lengths seen lately.
    """

    def plan(self, state: AdmissionState) -> bool:
        rows = joined(state.running, state.next)
        own = rows.tokens - rows.shared * state.page_size
        if int((-(-(own + rows.left) // state.page_size)).sum()) <= state.pages:  # however long the answers are
            return True
        shifts = np.arange(_DRAWS)[:, None] / _DRAWS
        return bool((_peaks(own, drawn(rows, state.lengths, shifts), state.page_size) <= state.pages).all())


def _peaks(tokens: Counts, left: Counts, page_size: int) -> Counts:
    """Return the most pages that rows hold at one time, if each grows by a token a step until none is left: ``[K]``."""
    order = np.argsort(-left, axis=1)
    later = np.take_along_axis(left, order, 1)  # the row that ends last first
    rows = np.arange(1, len(tokens) + 1)  # that run until each one's end, with it
    peak = np.argmax(np.cumsum(tokens[order], axis=1) + rows * (later + page_size // 2), axis=1)[:, None]
    at = np.take_along_axis(later, peak, 1)
    peaks: Counts = np.where(left >= at, -(-(tokens + at) // page_size), 0).sum(axis=1)
    return peaks
