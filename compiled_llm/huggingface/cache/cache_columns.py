"""The changes that a call makes in the rows of a cache, column by column: masked tokens are not stored."""

# HuggingFace's caches hold a column for each token that a row was given, and attention masks hide some. Pages hold only
# visible tokens, so a cache remembers their columns. A later mask may differ there: a token that it hides is forgotten
# together with all after it, and tokens that are then missing are stored again.
# Shapes: B rows, C columns a cache has been given, Q columns of a call's tokens.

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class RowUpdate(NamedTuple):
    """The changes of a call in one row."""

    kept: int  # how many tokens of the row stay
    unchanged: int  # how many columns of the cache stay as they are
    # the columns that are stored, ascending; column 0 is the first one that the cache ever got
    columns: NDArray[np.int64]

    @property
    def length(self) -> int:
        return self.kept + len(self.columns)


def row_updates(
    stored: NDArray[np.bool_], mask: NDArray[np.bool_] | None, first: int, last: int, keeps_states: bool = False
) -> list[RowUpdate]:
    """Return the changes in each row of a cache; ValueError if the mask shows a token that is neither stored nor here.

    Args:
        stored: ``[B, C]``, True for columns that lie in pages.
        mask: ``[B, C']`` that ends with column ``last``, False where hidden; None hides nothing new.
        first: the column of the first token at hand; ``last`` is one past that of the last.
        keeps_states: a row that is to forget a token begins again, as it has no state from before it.
    """
    batch, seen = stored.shape
    if not (seen or first) and (mask is None or mask.all()):
        return [RowUpdate(0, 0, np.arange(last))] * batch
    wanted = np.ones((batch, last), dtype=bool)
    wanted[:, :seen] = stored
    if mask is not None:
        covered = min(last, mask.shape[1])
        wanted[:, last - covered :] = mask[:, mask.shape[1] - covered :]
    rows = [_row_update(*row, keeps_states) for row in zip(stored, wanted, strict=True)]
    for row, update in enumerate(rows):
        if len(update.columns) and update.columns[0] < first:
            raise ValueError(
                f"attention_mask: row {row} needs token {update.columns[0]} again, which the cache does not hold or "
                "holds after hidden ones; give the whole text as input_ids, or hide only the last tokens"
            )
    return rows


def _row_update(stored: NDArray[np.bool_], wanted: NDArray[np.bool_], keeps_states: bool) -> RowUpdate:
    changed = np.flatnonzero(wanted[: len(stored)] != stored)
    unchanged = int(changed[0]) if len(changed) else len(stored)
    if keeps_states and stored[unchanged:].any():
        unchanged = 0
    return RowUpdate(int(stored[:unchanged].sum()), unchanged, unchanged + np.flatnonzero(wanted[unchanged:]))


def with_updates(stored: NDArray[np.bool_], rows: Sequence[RowUpdate], last: int) -> NDArray[np.bool_]:
    """Return ``[B, last]``, True for the columns that lie in pages once the updates are stored."""
    after = np.zeros((len(rows), last), dtype=bool)
    for row, update in enumerate(rows):
        after[row, : update.unchanged] = stored[row, : update.unchanged]
        after[row, update.columns] = True
    return after


def with_only_kept(stored: NDArray[np.bool_], rows: Sequence[RowUpdate]) -> NDArray[np.bool_]:
    """Return ``[B, C]``, the columns that lie in pages once rows have dropped all but the kept tokens."""
    return with_updates(stored, [row._replace(columns=row.columns[:0]) for row in rows], stored.shape[1])


def same_rows(ids: NDArray[np.int64], positions: NDArray[np.int64], fresh: Sequence[NDArray[np.int64]]) -> list[int]:
    """Return for each row the first one with the same tokens: beams begin as copies, and one of them is computed."""
    return first_equal(np.stack([new, ids[row][new], positions[row][new]]) for row, new in enumerate(fresh))


def first_equal(rows: Iterable[NDArray[np.int64]]) -> list[int]:
    """Return for each row the number of the first one that equals it."""
    first: dict[bytes, int] = {}
    return [first.setdefault(row.tobytes(), number) for number, row in enumerate(rows)]


def counted_positions(rows: Sequence[RowUpdate], first: int, new: int) -> Tensor:
    """Return ``[B, Q]``, the number of stored tokens before each new one."""
    positions = torch.zeros(len(rows), new, dtype=torch.int64, device="cpu")
    for batch_index, row in enumerate(rows):
        positions[batch_index, torch.from_numpy(row.columns - first)] = torch.arange(row.kept, row.length, device="cpu")
    return positions


LogitsToKeep = int | slice | Sequence[int] | Tensor
"""HuggingFace's: 0 for all columns of new tokens, n for the last n, or those that are named."""


def kept_columns(logits_to_keep: LogitsToKeep, new: int) -> NDArray[np.int64]:
    """Return the new tokens' columns that ``logits_to_keep`` asks for: 0 all, n the last n, a slice or list those."""
    if isinstance(logits_to_keep, int):
        return np.arange(new)[slice(-logits_to_keep, None)]
    kept = logits_to_keep.cpu() if isinstance(logits_to_keep, Tensor) else logits_to_keep
    columns: NDArray[np.int64] = torch.arange(new, device="cpu")[kept, ...].numpy()
    return columns


def ascend(columns: NDArray[np.int64]) -> bool:
    return bool((columns[1:] > columns[:-1]).all())


def on_host(tensor: Tensor) -> NDArray[Any]:
    """Return a tensor as an array on the host; waits for the device if the tensor lies there."""
    return tensor.numpy(force=True)
