"""How the programs of the decode kernel share the keys of their rows.

Shapes: B rows, K kv heads, G query heads of one kv head, D' head dimension as stored.
"""

from __future__ import annotations

from typing import NamedTuple

ALONE = 3
"""Blocks that one program reads as fast as several that have to merge what they found."""

FEW = 4
"""Programs that a row and kv head gets even if the device is busy without: one row may be longer than all others."""

BUSY_NUMBERS = 2**17
"""Numbers of keys that one program reads alone, where the others keep the device busy: 1,024 keys of size 128."""

MOST_SPLITS = 64
"""Programs that share a row at most: the last of them reads what all others found."""

LARGE_PROGRAM = 160 * 1024
"""Bytes of shared memory that a program with blocks of 16,384 numbers needs."""


class Tiling(NamedTuple):
    """How programs share the keys of a row, and how each of them reads its own.

    Attributes:
        splits: programs for each row and kv head, at most.
        alone: blocks up to which one program reads all keys of a row.
        least: blocks that each of several programs reads at least.
        block: keys read at a time.
        stages: depth of the pipeline; with 5, two blocks and the page numbers of two more are on their way at a time,
            with 3, one.
        warps: in a program.
    """

    splits: int
    alone: int
    least: int
    block: int
    stages: int
    warps: int


def choose(
    rows: int, kv_heads: int, group: int, head_dim: int, most_keys: int, processors: int, shared_memory: int
) -> Tiling:
    """Return how keys are shared, from what never changes: not from lengths, since a recorded launch is replayed.

    The rules are fitted to times on an H200, rows of 160 to 32,768 keys at batch 1 to 64. What they say in short: as
    much on its way on each multiprocessor as fits, in one large program or in several small ones; and rows are split
    only while that occupies multiprocessors that would be idle. A few programs are there for rows that are much longer
    than the others, which nobody knows here. Those without keys end at once.

    Args:
        rows: B.
        kv_heads: K.
        group: G.
        head_dim: D'.
        most_keys: a bound on the keys that a query can see.
        processors: multiprocessors of the device.
        shared_memory: bytes of a multiprocessor.
    """
    items = rows * kv_heads
    if group > 16:  # results of so many heads need the registers themselves
        numbers, stages, warps = 2**13, 3, 4
    elif items <= processors and shared_memory >= LARGE_PROGRAM:
        numbers, stages, warps = 2**14, 5, 4
    else:
        numbers, stages, warps = 2**13, 5 if items <= 3 * processors else 3, 2
    splits, alone, least = processors // items, ALONE, 1
    if splits < FEW:
        splits, alone, least = FEW, BUSY_NUMBERS // numbers, BUSY_NUMBERS // numbers
    block = numbers // head_dim
    blocks = -(-most_keys // block)
    return Tiling(1 if blocks <= alone else min(splits, blocks, MOST_SPLITS), alone, least, block, stages, warps)
