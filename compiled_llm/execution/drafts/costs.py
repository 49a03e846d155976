"""What a step that checks q tokens a row costs, in steps of one token."""

# `tools/fit_tilings.py --only drafts` measures them on a GPU and prints both tables as they stand here.
# The numbers for CUDA lie inside the ranges that checks of known tokens took on an H100 (8B: 1, 4, 8 tokens of 1 and 8
# rows; 0.6B: of 1, 8 and 32 rows); those of 256 rows are guesses, and so are all of a CPU: they only decide how many
# tokens a step checks.

from __future__ import annotations

from collections.abc import Mapping

_Costs = Mapping[int, Mapping[int, float]]
"""By the most rows, then by q."""

_LARGE: _Costs = {
    1: {2: 1.05, 4: 1.08, 8: 1.12},
    8: {2: 1.06, 4: 1.09, 8: 1.2},
    32: {2: 1.1, 4: 1.2, 8: 1.6},
    256: {2: 1.6, 4: 2.8, 8: 5.0},
}
_SMALL: _Costs = {
    1: {2: 1.15, 4: 1.25, 8: 1.35},
    8: {2: 1.2, 4: 1.4, 8: 1.6},
    32: {2: 1.25, 4: 1.5, 8: 1.95},
    256: {2: 1.7, 4: 3.0, 8: 5.5},
}
_CPU: _Costs = {8: {2: 1.2, 4: 1.5, 8: 2.2}, 256: {2: 1.6, 4: 2.8, 8: 5.0}}

_LARGE_BYTES = 4 << 30
"""Of the layers' matrices, from which on a step takes the time in which they are read."""


class Costs:
    """The costs of the steps of one model."""

    def __init__(self, matrix_bytes: int, on_cuda: bool) -> None:
        self._table = (_LARGE if matrix_bytes >= _LARGE_BYTES else _SMALL) if on_cuda else _CPU

    def of(self, new_tokens: int, rows: int) -> float:
        """Return what a step of q tokens of so many rows takes, in steps of one token each."""
        if new_tokens == 1:
            return 1.0
        most = next((most for most in self._table if rows <= most), max(self._table))
        return self._table[most][new_tokens]
