"""How the programs of the decode kernel share the keys of their rows.

Shapes: B rows, K kv heads, G query heads of one kv head, D' head dimension as stored.
"""

from __future__ import annotations

from typing import NamedTuple

ALONE = 3
"""Blocks that one program reads as fast as several that have to merge what they found."""

FEW = 4
"""Programs that there are for a row and kv head on average even if the device is busy without: one may be long."""

BUSY_NUMBERS = 2**17
"""Numbers of keys that one program reads alone, where the others keep the device busy: 1,024 keys of size 128."""

MOST_SHARES = 64
"""Programs that share a row at most: the last of them reads what all others found."""

MOST_ROWS = 32
"""Rows that share programs at most: one for each thread of a warp, which sums their numbers in one instruction."""

LARGE_PROGRAM = 160 * 1024
"""Bytes of shared memory that a program with blocks of 16,384 numbers needs."""


class Tiling(NamedTuple):
    """How programs share the keys of rows, and how each of them reads its own.

    Attributes:
        together: rows that share programs, next to each other: 1 or up to MOST_ROWS.
        programs: for each kv head of these rows; one for each row at least.
        alone: blocks up to which one program reads all keys of a row.
        least: the size of a share in blocks, at least; rows are cut evenly into as few as are no larger.
        block: keys read at a time.
        stages: depth of the pipeline; with 5, two blocks and the page numbers of two more are on their way at a time,
            with 3, one.
        warps: in a program.
        alike: whether rows of like lengths are shared as well; if not, rows are shared only to end at the same time.
    """

    together: int
    programs: int
    alone: int
    least: int
    block: int
    stages: int
    warps: int
    alike: bool = True


def choose(
    rows: int, kv_heads: int, group: int, head_dim: int, most_keys: int, processors: int, shared_memory: int
) -> Tiling:
    """Return how keys are shared, from what never changes: not from lengths, since a recorded launch is replayed.

    The shapes of programs are fitted to times on an H200, rows of 160 to 32,768 keys at batch 1 to 64. What they say
    in short: as much on its way on each multiprocessor as fits, in one large program or in several small ones.

    There are as many programs as occupy multiprocessors that would be idle, and a few for each row in any case: one
    row may be much longer than the others, which nobody knows here. Those without keys end at once. Where no row can
    be long, each has one. Rows of like lengths that are three times as many as multiprocessors end together as it is:
    sharing 64 of 1,100 keys took 9% longer.

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
    elif items <= 2 * processors and shared_memory >= LARGE_PROGRAM:
        numbers, stages, warps = 2**14, 5 if items <= processors else 3, 4
    else:
        numbers, stages, warps = 2**13, 5 if items <= 3 * processors else 3, 2
    splits, alone, least = processors // items, ALONE, 1
    if splits < FEW:
        splits, alone, least = FEW, BUSY_NUMBERS // numbers, BUSY_NUMBERS // numbers
    block = numbers // head_dim
    blocks = -(-most_keys // block)
    if blocks <= alone:
        return Tiling(1, 1, alone, least, block, stages, warps)
    together = -(-rows // -(-rows // MOST_ROWS))
    programs = together * min(splits, blocks, MOST_SHARES)
    return Tiling(together, programs, alone, least, block, stages, warps, alike=items <= 3 * processors)
