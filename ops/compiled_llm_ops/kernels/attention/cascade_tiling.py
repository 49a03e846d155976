"""How the kernel that attends over shared runs of pages is launched.

The constants are not yet fitted: nothing has been measured on a GPU. They follow from what fits: a tile of 64 queries
is what one warpgroup multiplies, and its results of float32 and the blocks that are being loaded must have room in
registers and in shared memory.

Shapes: K kv heads, D' head dimension as stored, W work items.
"""

from __future__ import annotations

from typing import NamedTuple

LARGE_HEAD = 256
"""Head sizes from which on four warps have too few registers for the results of a tile and a block of many keys."""

BLOCK_KEYS, BLOCK_KEYS_OF_LARGE_HEADS = 64, 32
"""Keys read at a time."""

STAGES = 3
"""Stages of the pipeline: one block of 32 KB is used while the next one is being loaded."""

WARPS, WARPS_OF_LARGE_HEADS = 4, 8

PROGRAMS = 1
"""Programs for each multiprocessor, whose items the host makes about equally long."""


class CascadeTiling(NamedTuple):
    """How work items are read.

    Attributes:
        programs: for each kv head; they take items in turn.
        block: keys read at a time.
        stages: of the pipeline.
        warps: in a program.
    """

    programs: int
    block: int
    stages: int
    warps: int


def choose_cascade_tiling(kv_heads: int, head_dim: int, items: int, processors: int) -> CascadeTiling:
    """Return the tiling by constant properties: not by the items that are used, since a captured launch is replayed.

    Args:
        kv_heads: K.
        head_dim: D'.
        items: W, the used and the unused ones.
        processors: multiprocessors of the device.
    """
    programs = max(1, min(items, PROGRAMS * processors // kv_heads))
    if head_dim >= LARGE_HEAD:
        return CascadeTiling(programs, BLOCK_KEYS_OF_LARGE_HEADS, STAGES, WARPS_OF_LARGE_HEADS)
    return CascadeTiling(programs, BLOCK_KEYS, STAGES, WARPS)
