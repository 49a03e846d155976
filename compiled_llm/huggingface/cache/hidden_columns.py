"""Finds attention that would see other tokens than HuggingFace's, because some of a row are hidden."""

# HuggingFace's windows and blocks count columns, hidden ones too; pages hold only visible tokens, and ours count those.
# Shapes: B rows, C columns, Q columns of a call's tokens.

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from compiled_llm.execution.reporting.slow_paths import SlowPath
from compiled_llm.huggingface.cache.cache_columns import RowUpdate


class VisibilityMismatchError(ValueError):
    """A row would see other tokens than in HuggingFace's forward, which can serve the call for this ``reason``."""

    def __init__(self, reason: SlowPath, message: str) -> None:
        super().__init__(message)
        self.reason: SlowPath = reason


def check_blocks(rows: Sequence[RowUpdate], first: int, positions: NDArray[np.int64]) -> None:
    """Raise VisibilityMismatchError unless positions ``[B, Q]`` or ``[1, Q]`` from ``first`` count the rows' own."""
    for row, update in enumerate(rows):
        given = positions[row % len(positions)][update.columns - first]
        if not np.array_equal(given, np.arange(update.kept, update.length)):
            raise VisibilityMismatchError(
                "padded_blocks",
                f"position_ids: those of row {row} do not count its own tokens, as blocks of tokens in pages do; give "
                "position_ids=(attention_mask.cumsum(1) - 1).clamp(min=0) of the new tokens",
            )


def check_windows(stored: NDArray[np.bool_], first: int, growth: int, windows: Sequence[int]) -> None:
    """Raise VisibilityMismatchError if windows see other tokens when they count stored tokens instead of columns.

    Args:
        stored: ``[B, C]``, True for columns that lie in pages.
        growth: how many tokens each row may get after column C.
        windows: the layers' windows in tokens, a query itself included.
    """
    if (found := differing_window(stored, first, growth, windows)) is not None:
        row, window = found
        raise VisibilityMismatchError(
            "hidden_in_window",
            f"attention_mask: row {row} has hidden tokens between others, which attention windows of {window} tokens "
            "count in HuggingFace's forward, and not in pages; leave the hidden tokens out and begin with a new cache",
        )


def differing_window(
    stored: NDArray[np.bool_], first: int, growth: int, windows: Sequence[int]
) -> tuple[int, int] | None:
    """Return a row and a window of it that ``check_windows`` would raise for; None if all see the same."""
    width = stored.shape[1]
    if not windows or width + growth <= min(windows):
        return None
    for row, shown in enumerate(stored):
        columns = np.concatenate([np.flatnonzero(shown), np.arange(width, width + growth)])
        if not len(columns) or columns[-1] - columns[0] + 1 == len(columns):
            continue
        queries = np.arange(np.searchsorted(columns, first), len(columns))
        for window in windows:
            farthest = columns[np.maximum(0, queries + 1 - window)]
            if (farthest <= columns[queries] - window).any():
                return row, window
    return None
