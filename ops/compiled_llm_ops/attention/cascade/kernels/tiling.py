"""How the kernel that attends over shared runs of pages is launched."""

# The constants were fitted to times on an H100, with heads of 128 and 2 or 4 query heads of a kv head: 16 to 256 rows
# over runs of 1,024 to 8,192 keys, with 64 to 450 keys of their own, whose attention runs beside. Larger heads were not
# measured: their blocks are those for which registers and shared memory suffice. ``tools/fit_tilings.py --only
# cascade`` measures that again, on any GPU.
# Shapes: K kv heads, D' head dimension as stored, W work items.

from __future__ import annotations

from typing import NamedTuple

LARGE_HEAD = 256
"""Head sizes from which on four warps have too few registers for the results of a tile and a block of many keys."""

BLOCKS, BLOCKS_OF_LARGE_HEADS = (128, 64, 32), (32,)
"""Keys read at a time, the most first: a block of 64 took 1% longer on average, 10% over 8,192 keys."""

STAGES = 3  # stages of the pipeline: one block is used while the next one is being loaded

WARPS, WARPS_OF_LARGE_HEADS = 4, 8

PROGRAMS = 1
"""Programs for each multiprocessor, whose items the host makes about equally long."""
# With two, attention over the rows' own keys finds less room beside them, and both take up to 12% longer.

_RESERVED = 8192  # bytes of shared memory that blocks do not have


class CascadeTiling(NamedTuple):
    """The way work items are read."""

    programs: int  # for each kv head; they take items in turn
    block: int
    stages: int
    warps: int


def choose_cascade_tiling(
    kv_heads: int, head_dim: int, items: int, processors: int, shared_memory: int
) -> CascadeTiling:
    """Return the tiling by constant properties: not by the items that are used, since a captured launch is replayed."""
    # ``items`` is W, the used and the unused ones; ``shared_memory`` is of each processor, in bytes.
    programs = max(1, min(items, PROGRAMS * processors // kv_heads))
    large = head_dim >= LARGE_HEAD
    blocks = BLOCKS_OF_LARGE_HEADS if large else BLOCKS
    room = shared_memory - _RESERVED
    block = next((block for block in blocks if STAGES * _block_bytes(block, head_dim) <= room), blocks[-1])
    return CascadeTiling(programs, block, STAGES, WARPS_OF_LARGE_HEADS if large else WARPS)


def _block_bytes(keys: int, head_dim: int) -> int:
    """Return what the keys and values of a block take, in 16 bits."""
    return 2 * 2 * keys * head_dim
