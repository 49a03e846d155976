"""How the programs of the decode kernel share the keys of their rows."""

# The rule's constants were fitted to times on an H200, with rows of 160 to 32,768 keys at batch 1 to 64, and of 100 to
# 2,048 keys, as many each or at random, at batch 128 and 256. ``tools/fit_tilings.py --only attention`` measures that
# again, on any GPU.
# Shapes: B rows, K kv heads, G query heads of one kv head, D' head dimension as stored.

from __future__ import annotations

from typing import NamedTuple

ALONE = 3  # blocks that one program reads as fast as several that have to merge their results

FEW = 4  # programs for a row and kv head on average even if the device is busy without them: one row may be long

BUSY_VALUES = 2**17
"""Values of keys that one program reads alone while others keep the device busy: 1,024 keys of size 128."""

MAX_SHARES = 64  # programs that share a row at most: the last of them reads the results of all

MAX_ROWS = 32
"""Rows that share programs at most: one for each thread of a warp, which sums over them in one instruction."""

SMALL_BLOCK, LARGE_BLOCK = 2**13, 2**14  # values of keys in a block: 64 or 128 keys of size 128

EXACT_BLOCK, SMALLEST_BLOCK = 2**11, 16
"""Values in a block of float32, which has so many keys at least."""
# It is multiplied without tensor cores: threads hold whole rows of a block in their registers, and more of them spill.

LARGE_PROGRAM = 160 * 1024  # bytes of shared memory that a program with large blocks needs

NARROW_REGISTERS, LEAST_OF_NARROW = 168, 128
"""Registers of a thread with which three large programs of 8 bits fit a multiprocessor, as shared memory has room for
them; and the head size as stored from which on they suffice."""
# The compiler takes 185 to 212 if it may, and two programs fit.

MAX_LARGE = 0.75
"""Rows and kv heads for each multiprocessor up to which large programs are faster than several small ones."""
# Measured in whole steps of Qwen3-0.6B, where 8 rows decode 6% faster with large ones, 16 rows 1% and 32 rows 3%
# slower; alone, launch after launch, attention of 8 long rows is faster with small ones.

MAX_DEEP = 3
"""Rows and kv heads for each multiprocessor up to which pipelines are deep, and rows of like lengths shared."""
# With more, they end together anyway, and sharing 64 of 1,100 keys took 9% longer. Of 8 bits, with blocks of half the
# bytes, programs are large up to here, those of 16 rows and more half as many for a row. Beyond, small ones with deep
# pipelines took 0.72 to 0.95 of the time on an H200, one for each of 64 to 256 rows of 256 to 4,096 keys.

MANY, FEW_OF_MANY = 4, 2
"""Rows and kv heads for each multiprocessor from which on there are fewer programs for each, and pipelines are deep."""
# Programs without keys take 10% of the time with 256 rows of 100 keys, and where some rows are long, those that read
# them are soon alone: with half of 256 rows at 1,500 keys and half at 150, it takes 7% less, with 128 rows 15%. Rows of
# equal lengths take up to 4% more with 128 rows, nothing with 256.

DEEP, SHALLOW = 5, 3
"""Stages of the pipeline: two blocks and the page numbers of two more are being loaded at a time, or one block."""

LISTED_BLOCK, LISTED_STAGES = 32, 7
"""Of rows that read lists of pages: keys in a block, and stages of a program, which is one warp."""
# Lists are read before page numbers, and those before keys, so that three loads wait for each other: a pipeline needs
# more stages to load as many keys ahead, and many small programs hide more of that than a large one. On an H200, rows
# that read 2,048 of 16,384 keys took 23.8 microseconds if there were 8, 40.7 if 16, 72.9 if 32 and 135 if 64, and 31,
# 50, 95 and 139 with programs as for all pages; without other keys 23.6, 48, 82 and 128.

LISTED_PROGRAM, LISTED_RESIDENT, LISTED_SHARE = 56 * 1024, 4, 128
"""Bytes of shared memory of such a program, how many a multiprocessor holds, and keys that each reads at least."""
# With 256 keys, 2 rows took 18.4 microseconds in place of 14.2, and 4 took 18.8 in place of 15.8.

LARGEST_OF_WARP = 128  # head size up to which a warp's registers hold its sums

MAX_GQA = 16  # query heads of a kv head up to which registers hold more than the results: with more, blocks are small


class AttentionTiling(NamedTuple):
    """The way programs share the keys of rows, and how each of them reads its own."""

    row_tile: int  # rows that share programs, next to each other: 1 or up to MAX_ROWS
    programs: int  # for each kv head of these rows; one for each row at least
    unsplit: int  # blocks up to which one program reads all keys of a row
    min_share: int  # the fewest blocks of a share; rows are cut evenly into as few as are no larger
    block: int
    stages: int  # of the pipeline, DEEP or SHALLOW
    warps: int
    # whether rows of about equal lengths are shared as well; if not, rows are shared only so that all end at the same
    # time
    share_equal: bool = True
    registers: int | None = None  # of a thread, at most; None for as many as the compiler likes


def choose_attention_tiling(
    rows: int,
    kv_heads: int,
    gqa: int,
    head_dim: int,
    max_keys: int,
    processors: int,
    shared_memory: int,
    number_bytes: int = 2,
    query_bytes: int = 2,
) -> AttentionTiling:
    """Return how keys are shared, by constant properties: not by lengths, since a captured launch is replayed."""
    # In short: each multiprocessor loads as much at a time as it can hold, in one large program or in several small
    # ones. There are as many programs as occupy multiprocessors that would be idle, and a few for each row in any case:
    # one row may be much longer than the others, and lengths are unknown here. Programs without keys end at once. If no
    # row can be long, each has one program.
    # ``gqa`` is G, times the new tokens of a row; ``max_keys`` bounds the keys that a query can see; ``shared_memory``
    # is bytes of a multiprocessor, ``number_bytes`` of a number in the pages, ``query_bytes`` of one of the queries.
    items, narrow = rows * kv_heads, number_bytes == 1 and query_bytes == 2
    few, many = items <= MAX_LARGE * processors, items > MAX_DEEP * processors
    if query_bytes > 2:
        values, stages, warps = EXACT_BLOCK, SHALLOW, 4
    elif gqa > MAX_GQA:
        values, stages, warps = SMALL_BLOCK, SHALLOW, 4
    elif (few or (narrow and not many)) and shared_memory >= LARGE_PROGRAM:
        values, stages, warps = LARGE_BLOCK, DEEP, 4
    else:
        between = many and items <= MANY * processors and not narrow
        values, stages, warps = SMALL_BLOCK, SHALLOW if between else DEEP, 2
    splits, unsplit, min_share = processors // items, ALONE, 1
    if splits < FEW:
        splits = FEW_OF_MANY if items > MANY * processors or (narrow and not few) else FEW
        if not (narrow and few):
            unsplit = min_share = BUSY_VALUES // values
    block = max(SMALLEST_BLOCK, values // head_dim)
    blocks = -(-max_keys // block)
    if blocks <= unsplit:
        return AttentionTiling(1, 1, unsplit, min_share, block, stages, warps)
    row_tile = -(-rows // -(-rows // MAX_ROWS))
    programs = row_tile * min(splits, blocks, MAX_SHARES)
    several = narrow and values == LARGE_BLOCK and items > processors and head_dim >= LEAST_OF_NARROW
    registers = NARROW_REGISTERS if several else None
    return AttentionTiling(row_tile, programs, unsplit, min_share, block, stages, warps, not many, registers)


def choose_listed_tiling(
    rows: int,
    kv_heads: int,
    gqa: int,
    head_dim: int,
    max_keys: int,
    processors: int,
    shared_memory: int,
    number_bytes: int = 2,
    query_bytes: int = 2,
) -> AttentionTiling:
    """Return how keys are shared if rows read lists of their pages; arguments as of ``choose_attention_tiling``."""
    # All rows have lists of one length, so their keys are shared evenly, among as many programs as run at once.
    items = rows * kv_heads
    sizes = (rows, kv_heads, gqa, head_dim, max_keys, processors, shared_memory, number_bytes, query_bytes)
    small = number_bytes == query_bytes == 2 and gqa <= MAX_GQA and head_dim <= LARGEST_OF_WARP
    if not small or shared_memory < LISTED_RESIDENT * LISTED_PROGRAM:
        return choose_attention_tiling(*sizes)._replace(stages=SHALLOW)
    blocks = -(-max_keys // LISTED_BLOCK)
    shares = max(1, min(LISTED_RESIDENT * processors // items, max_keys // LISTED_SHARE, MAX_SHARES))
    share = -(-blocks // shares)
    row_tile = 1 if shares == 1 else -(-rows // -(-rows // MAX_ROWS))
    return AttentionTiling(row_tile, row_tile * shares, share, share, LISTED_BLOCK, LISTED_STAGES, 1)
