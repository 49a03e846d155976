"""What a call adds to the rows of a cache, column by column: masked tokens are not stored.

HuggingFace's caches hold a column for each token that a row was given, and attention masks hide some. Pages hold only
what is not hidden, so a cache remembers which columns those are. A later mask may differ there: what it hides is
forgotten together with all that came after it, and what then is missing is stored anew.

Shapes: B rows, C columns a cache has been given, Q columns of a call's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Addition(NamedTuple):
    """What a call does to one row.

    Attributes:
        kept: tokens of the row that stay.
        unchanged: columns of the cache that stay as they are.
        columns: the columns that are stored, ascending; column 0 is the first that the cache was ever given.
    """

    kept: int
    unchanged: int
    columns: NDArray[np.int64]

    @property
    def length(self) -> int:
        """Tokens in the row afterwards."""
        return self.kept + len(self.columns)


def additions(stored: NDArray[np.bool_], mask: NDArray[np.bool_] | None, first: int, last: int) -> list[Addition]:
    """Return what each row of a cache gets.

    Args:
        stored: ``[B, C]``, which columns lie in pages.
        mask: ``[B, C']`` that ends with column ``last``, False where hidden; None hides nothing new.
        first: the column of the first token at hand.
        last: one past the column of the last.

    Raises:
        ValueError: the mask shows a token again that is neither stored nor at hand.
    """
    batch, seen = stored.shape
    if not (seen or first) and (mask is None or mask.all()):
        return [Addition(0, 0, np.arange(last))] * batch
    wanted = np.ones((batch, last), dtype=bool)
    wanted[:, :seen] = stored
    if mask is not None:
        covered = min(last, mask.shape[1])
        wanted[:, last - covered :] = mask[:, mask.shape[1] - covered :]
    rows = [_addition(*row) for row in zip(stored, wanted, strict=True)]
    for row, addition in enumerate(rows):
        if len(addition.columns) and addition.columns[0] < first:
            raise ValueError(
                f"attention_mask: row {row} needs token {addition.columns[0]} again, which the cache does not hold or "
                "holds behind hidden ones; give the whole text as input_ids, or hide only the last tokens"
            )
    return rows


def _addition(stored: NDArray[np.bool_], wanted: NDArray[np.bool_]) -> Addition:
    changed = np.flatnonzero(wanted[: len(stored)] != stored)
    unchanged = int(changed[0]) if len(changed) else len(stored)
    return Addition(int(stored[:unchanged].sum()), unchanged, unchanged + np.flatnonzero(wanted[unchanged:]))


def with_additions(stored: NDArray[np.bool_], rows: Sequence[Addition], last: int) -> NDArray[np.bool_]:
    """Return ``[B, last]``, which columns lie in pages once the additions are there."""
    after = np.zeros((len(rows), last), dtype=bool)
    for row, addition in enumerate(rows):
        after[row, : addition.unchanged] = stored[row, : addition.unchanged]
        after[row, addition.columns] = True
    return after


def without_changes(stored: NDArray[np.bool_], rows: Sequence[Addition]) -> NDArray[np.bool_]:
    """Return ``[B, C]``, which columns lie in pages once rows have forgotten all but what they keep."""
    return with_additions(stored, [row._replace(columns=row.columns[:0]) for row in rows], stored.shape[1])
