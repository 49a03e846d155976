"""How programs of the block-sparse kernel divide queries and keys."""

# Tiles of up to 16 queries and heads were fitted on an H200 to rows that read 2,048 keys; larger ones to no times.
# ``tools/fit_tilings.py --only block-sparse`` measures that again, on any GPU.
# Shapes: H query heads, K kv heads, G query heads of one kv head, D head dimension.

from __future__ import annotations

from typing import NamedTuple

import torch

from compiled_llm_ops.contracts.devices import power_of_two

DTYPES = (torch.float16, torch.bfloat16)

FEWEST, MOST, MOST_OF_LARGE = 16, 128, 64
"""Queries and heads of a program: tensor cores take no fewer; sums of more, of large heads of fewer, fill registers."""

LARGE_HEAD, LARGEST_HEAD = 128, 256  # head sizes from which on, beyond, and up to which there are kernels

BLOCK_VALUES, FEW_BLOCK_VALUES = 2**13, 2**12
"""Values of keys in a block, 64 of size 128, and for the fewest queries and heads."""

STAGES, FEW_STAGES = 3, 4
"""Of the pipeline: a block and the list's entries of the next one, or of two, are being loaded at a time."""

MERGED_VALUES, MERGED_COLUMNS = 2**12, 32
"""Values of partial results that are merged at a time, and columns of a head's that they are of, at least."""
# Columns are merged one after the other, and each waits for what it loads: with 16 rows, where 4 have results, and four
# times 32 columns, merging took a quarter of the time of 8 rows that read 2,048 keys on an H100.

RESIDENT = 8
"""Programs for each multiprocessor, at most: as many as it holds, and more, so that all end together."""
# A captured launch may have room for many more items than there are: on an H200, 8 rows of 8 kv heads took 31
# microseconds by themselves, and 64 with a program for each of 4,096 items and each head.


class SparseTile(NamedTuple):
    """The queries of a program, and the keys that it loads at a time."""

    queries: int  # of a row of blocks, next to each other, each with all query heads of a kv head
    padded: int  # queries times G, as a power of two
    block: int
    stages: int
    warps: int


def sparse_tile(block_rows: int, gqa: int, head_dim: int, masked: bool = False) -> SparseTile:
    """Return the tile for rows of about so many queries, and G heads; by constant properties of a captured launch."""
    # A mask inside blocks makes those of keys smaller: its addresses take registers. Queries are as many without.
    most = MOST if head_dim <= LARGE_HEAD else MOST_OF_LARGE
    padded = max(FEWEST, min(most, power_of_two(block_rows * gqa)), power_of_two(gqa))
    stored = max(FEWEST, power_of_two(head_dim))
    values, stages, warps = BLOCK_VALUES, STAGES, 8 if padded > 64 else 4
    if padded == FEWEST and head_dim <= LARGE_HEAD:  # a warp's registers hold their sums
        values, stages, warps = FEW_BLOCK_VALUES, FEW_STAGES, 1
    block = max(16, values // max(64, stored) // (2 if masked else 1))
    return SparseTile(padded // gqa, padded, block, stages, warps)


class SparseMerge(NamedTuple):
    """The way the partial results of a row that several programs read are merged."""

    rows: int  # queries and heads of a partial result, as a power of two
    columns: int  # merged at a time
    chunk: int  # partial results that are loaded at a time


def sparse_merge(queries: int, gqa: int, stored: int) -> SparseMerge:
    """Return how results of up to so many queries with G heads each are merged, of ``stored`` values a head."""
    rows = power_of_two(queries * gqa)
    columns = min(stored, max(MERGED_COLUMNS, MERGED_VALUES // (2 * rows)))
    return SparseMerge(rows, columns, max(1, MERGED_VALUES // (rows * columns)))


def most_programs(processors: int, heads: int) -> int:
    """Return how many programs a launch has at most for each of so many heads of its grid."""
    return -(-RESIDENT * processors // heads)


def missing_kernel(head_dim: int, dtype: torch.dtype) -> str | None:
    """Return why there is no kernel; None if there is one."""
    if dtype not in DTYPES:
        return f"no kernel for {dtype}; use torch.bfloat16 or torch.float16"
    if head_dim > LARGEST_HEAD:
        return f"no kernel for heads of size {head_dim}; there are some up to {LARGEST_HEAD}"
    return None
