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
        shifts = np.arange(_DRAWS)[:, None] / _DRAWS
        return all(_peak(own, left, state.page_size) <= state.pages for left in drawn(rows, state.lengths, shifts))


def _peak(tokens: Counts, left: Counts, page_size: int) -> int:
    """Return the most pages that rows hold at one time, each growing by a token a step until nothing is left."""
    order = np.argsort(-left)
    tokens, left = tokens[order], left[order]
    rows = np.arange(1, len(left) + 1)  # that run until each one's end, with it
    last = int(np.argmax(np.cumsum(tokens) + rows * (left + page_size // 2)))
    return int((-(-(tokens[: last + 1] + left[last]) // page_size)).sum())
