"""How programs of the latent kernels divide heads and keys."""

# All heads of a row read the same latents, so a program takes as many as registers have room for: each has R sums of
# its own. Tiles follow from registers and shared memory of an H100. ``tools/fit_tilings.py --only latent-decode``
# measures tiles of decode and how rows are shared. Decode has two kernels, one of them for Hopper alone
# (``reads_by_hand``).
# Shapes: B rows, H query heads, R latent size.

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from compiled_llm_ops.contracts.devices import power_of_two
from compiled_llm_ops.contracts.latent import LatentDecode
from compiled_llm_ops.kernels.attention.decode_tiling import FEW, MAX_ROWS
from compiled_llm_ops.kernels.pdl import is_hopper

DTYPES = (torch.float16, torch.bfloat16)
FEWEST, MOST_RANK, MOST_ROPE = 16, 512, 128
"""Sizes are powers of two from 16 on: tensor cores multiply no fewer, and blocks are powers of two."""

MOST_QUERIES = 64
"""Queries of a program, at most: with R = 512 their sums take half of the registers of a multiprocessor."""

FEWEST_QUERIES = 16  # queries of a program, at least: tensor cores take no fewer

MANY_SUMS = 2**14
"""Sums of weighted latents from which on a program has twice as many warps, and tokens of one row only."""

BLOCK_VALUES = 2**14
"""Values of latents in a block: 32 tokens with R = 512, with which no tile needs more registers than there are."""

MOST_KEYS = 64  # keys in a block, at most

MOST_SHARES = 256  # programs that share a row at most

OWN_HEADS = 32
"""Query heads up to which our kernels are chosen by ``backend="auto"``; with more, FlashInfer's are."""
# On an H200, in decode steps of 1, 8 and 64 rows with 1,024, 8,192 and 65,536 keys, FlashInfer's took 1.95 to 1.04 of
# the time of ours with 16 heads, 1.62 to 0.96 with 20, and 0.93 to 0.64 with 128; they are planned on the host before
# each step, and whole steps of both were not measured. Up to 32 heads one program has all of them, as with 20. New rows
# are expanded with both. ``tools/fit_tilings.py --only latent-backend`` measures the kernels again.

STAGES = 5  # of the pipeline: two blocks and the page numbers of two more are being loaded at a time


def missing_kernel(rank: int, rope_size: int, dtype: torch.dtype) -> str | None:
    """Return why there is no kernel for such latents, R and E numbers of a dtype; None if there is one."""
    if dtype not in DTYPES:
        return f"no kernel for {dtype}; use torch.bfloat16 or torch.float16"
    for name, found, most in (("R", rank, MOST_RANK), ("E", rope_size, MOST_ROPE)):
        if not FEWEST <= found <= most or found & (found - 1):
            return f"no kernel for {name}={found}; there are some for powers of two, {FEWEST} to {most}"
    return None


class QueryTile(NamedTuple):
    """The queries of a program, and the keys that it loads at a time."""

    heads: int  # query heads next to each other, a power of two
    tokens: int  # packed tokens next to each other, each with all of these heads; 1 in decode
    block: int
    warps: int


def query_tile(heads: int, rank: int, most_tokens: int = 1) -> QueryTile:
    """Return a tile for H heads, those of one token first, and up to so many tokens, a power of two."""
    # A token's keys are read once for each tile of its heads.
    own = min(MOST_QUERIES, power_of_two(heads))
    tokens = max(1, min(most_tokens, MOST_QUERIES // own, MANY_SUMS // (own * rank)))
    own = max(own, FEWEST_QUERIES // tokens)
    many = own * tokens * rank >= MANY_SUMS
    return QueryTile(own, tokens, min(MOST_KEYS, BLOCK_VALUES // rank), 8 if many else 4)


# ---- decode


KEYS_FIRST_HEADS = 32
"""Query heads of a tile up to which its matrices are turned (``step.attend_keys_first``)."""
# Registers hold R sums of each head in the four warps that multiply 64 rows together.

DECODE_BLOCK = 64  # keys in a block of decode: as many rows as Hopper's tensor cores multiply at least

SHALLOW_BYTES = 48 * 1024
"""Bytes of a block's latents from which on shared memory has room for two blocks, not for three."""

SHALLOW = 3  # stages of the pipeline with two blocks: one is being loaded while sums of the other one are being added

SHARED_KEYS = 64  # keys that one program reads alone

BUSY_KEYS = 512
"""Keys that one program reads alone while others keep the device busy."""
# On an H100 64 rows of 1,024 keys took 42 microseconds with 16 heads, and 49 with half as many keys.

MAX_EQUAL = 0.75
"""Tiles of heads for each multiprocessor up to which rows of about equal lengths are shared."""
# With more, they end together anyway. With an earlier kernel, sharing 64 rows of 8,192 keys took 15% longer; with the
# one for Hopper, 6%.

BY_HAND = (MOST_RANK, 64)
"""R and E for which there is a kernel whose copies are ordered by hand (``kernels.latent.hopper``), those measured."""
# Its constants were fitted on an H200 to steps of 1, 8 and 64 rows of 1,024, 8,192 and 65,536 keys with 16, 20 and 128
# heads: programs are as many as were fastest in 26 of these 27 cases, and in the other one, a row of 8,192 keys with
# 128 heads, within 4%. ``tools/fit_tilings.py --only latent-decode`` measures them again.

ALIGNMENT = 16  # bytes that kernels copy at a time: pages begin at a multiple of them

MERGED_KEYS = 128
"""Keys that one of its programs reads alone, for each tile of heads."""
# Sixteen tiles of 64 keys instead take 22% longer with a row of 8,192 keys and 16 heads, since all that programs have
# found is merged.

FEW_MERGED = 16
"""Its programs whose results are merged so fast that each may have fewer keys."""
# With a row of 1,024 keys and 16 heads, half as many take 9% longer.


class LatentTiling(NamedTuple):
    """The way programs share the keys of rows, and how each of them reads its own."""

    heads: int  # query heads of a program, next to each other: a power of two, 16 at least
    row_tile: int  # rows that share programs, next to each other: 1 or up to MAX_ROWS
    programs: int  # for each tile of heads of these rows; one for each row at least
    # the fewest blocks of a share, and blocks up to which one program reads all keys of a row; rows are cut evenly into
    # as few shares as are no larger
    min_share: int
    few: int  # programs up to which these rows are cut into shares of fewer blocks
    equal: int  # programs that share a row at most if all have about as many keys
    block: int
    stages: int
    warps: int
    keys_first: bool  # whether keys are rows of the products (``step.attend_keys_first``)
    by_hand: bool  # whether by the kernel that ``reads_by_hand`` is about
    merged: int  # numbers of a head that one program merges if several have read its keys: R, or a part

    @property
    def merged_parts(self) -> int:
        """How many partial results of a head a program merges at a time."""
        return min(MERGED_PARTS, self.times_merged * MERGED_VALUES // self.merged)

    @property
    def times_merged(self) -> int:
        """By how much there are more values and programs that merge: 2 if a row has many partial results, else 1."""
        return 2 if self.programs > MERGED_PARTS * self.row_tile else 1


def reads_by_hand(args: LatentDecode) -> bool:
    """Return whether the kernel for Hopper takes these: chosen tokens, or all of rows in pages that divide a block."""
    sizes, pages = (args.query_latent.shape[2], args.query_rope.shape[2]), args.pages
    readable = args.chosen is not None or DECODE_BLOCK % pages.shape[1] == 0
    return sizes == BY_HAND and readable and is_hopper(pages.device)


def decode_tile(heads: int, rank: int, by_hand: bool = False) -> LatentTiling:
    """Return how one program reads the keys of a row alone with some of H heads: most fields as a tile has them."""
    tile = max(FEWEST_QUERIES, min(MOST_QUERIES, power_of_two(heads)))
    keys_first = tile <= KEYS_FIRST_HEADS
    stages = SHALLOW if 2 * DECODE_BLOCK * rank >= SHALLOW_BYTES else STAGES
    warps = 8 if not keys_first and tile * rank >= MANY_SUMS else 4
    return LatentTiling(tile, 1, 1, 1, 1, 1, DECODE_BLOCK, stages, warps, keys_first, by_hand, rank)


def choose_decode_tiling(
    rows: int, heads: int, rank: int, max_keys: int, processors: int, by_hand: bool = False
) -> LatentTiling:
    """Return how programs share the keys of rows, by constant properties as ``choose_attention_tiling`` does."""
    tile = decode_tile(heads, rank, by_hand)
    head_tiles = -(-heads // tile.heads)
    items = rows * head_tiles
    splits, alone, few = min(processors // items, MOST_SHARES), SHARED_KEYS, 1
    if by_hand:
        alone, few = MERGED_KEYS * head_tiles, max(1, FEW_MERGED // head_tiles)
    equal = splits
    if splits < FEW:
        splits, alone, equal = FEW, BUSY_KEYS, _equal_shares(items, processors, by_hand)
    least, blocks = max(1, alone // tile.block), -(-max_keys // tile.block)
    if blocks <= least:
        return tile
    row_tile = -(-rows // -(-rows // MAX_ROWS))
    programs = row_tile * min(splits, blocks)
    shared = tile._replace(row_tile=row_tile, programs=programs, min_share=least, few=few, equal=equal)
    most = shared.times_merged * int(MERGES_PER_PROCESSOR * processors)
    return shared._replace(merged=_merged_columns(rows * heads, rank, most))


def _equal_shares(items: int, processors: int, by_hand: bool) -> int:
    """Return in how many shares to cut rows of about equal lengths, so many that the device is busy without."""
    # By hand as few as end soonest, if each multiprocessor has one program at a time.
    if items > MAX_EQUAL * processors:
        return 1
    return min(range(1, FEW + 1), key=lambda shares: -(-items * shares // processors) / shares) if by_hand else FEW


MERGED_VALUES, MERGED_PARTS = 2**11, 32
"""Values of partial results that a program sums at a time, sixteen for each thread, and results at most."""
# With more results of a row there are twice as many of both: values, and programs that merge.

MERGED_COLUMNS = 64  # of the R numbers of a head that a program merges, at least

MERGES_PER_PROCESSOR = 1.5
"""Programs that merge for each multiprocessor, at most, where several merge a head: with more, they end later."""
# On an H200, 8 rows of 1,024 keys and 20 heads took 13.9 microseconds with one program for each row and head, 15.0 with
# two and 17.1 with four; one row of 65,536 keys and 20 heads took 48.8, 42.1 and 39.3, and 35.7 with eight.


def _merged_columns(items: int, rank: int, most: int) -> int:
    """Return how many of the R numbers of each of so many rows and heads a program merges, ``most`` in all."""
    columns = rank
    while columns > MERGED_COLUMNS and 2 * items * (rank // columns) <= most:
        columns //= 2
    return columns


# ---- expanded keys and values, which new rows attend to


MOST_EXPANDED = 256  # size of heads of expanded keys and values, at most: registers hold the sums of a tile of queries

RAGGED_QUERIES = 128
"""Queries of a program over expanded keys: two warpgroups of 64."""
# Half as many take half as long again for 2,048 tokens; for 256 tokens, 0.86 of the time.

WIDE_VALUES = 128  # size of values up to which a block has 64 keys; with larger ones it has half as many, for registers


EXPANDED_FROM = 1
"""New tokens of the longest row from which on keys and values are expanded for rows without cached tokens."""
# To expand takes as many multiplications as to absorb, and attention to expanded keys fewer, 1/3.4 of them with
# DeepSeek-V3's sizes. So it is on an H100: with 16 heads 11.8 microseconds instead of 13.8 for 8 tokens, 50 instead of
# 282 for 1,024; with 128 heads 23 instead of 27, and 331 instead of 1,029. ``tools/fit_tilings.py --only
# latent-prefill`` measures that again.


class RaggedTiling(NamedTuple):
    """Tiles of the kernel of ``ragged_attention``."""

    queries: int
    keys: int  # of a block
    stages: int
    warps: int


def ragged_tiling(head_dim: int, value_dim: int) -> RaggedTiling:
    """Return the tiling for expanded heads of these sizes."""
    keys = 64 if max(head_dim - 64, value_dim) <= WIDE_VALUES else 32
    return RaggedTiling(RAGGED_QUERIES, keys, stages=3, warps=8)


def missing_expanded(head_dim: int, value_dim: int) -> str | None:
    """Return why there is no kernel for expanded heads of these sizes; None if there is one."""
    if FEWEST <= head_dim <= MOST_EXPANDED and value_dim <= MOST_EXPANDED:
        return None
    return f"no kernel for heads of sizes {head_dim} and {value_dim}; there are some from {FEWEST} to {MOST_EXPANDED}"


def worth_expanding(queries: Sequence[int], lengths: Sequence[int]) -> bool:
    """Return whether a prefill of rows ``[B]`` is faster if it expands keys and values of its tokens."""
    # That takes rows without cached tokens: what is cached is never expanded.
    cached = any(count and length > count for count, length in zip(queries, lengths, strict=True))
    return not cached and max(queries, default=0) >= EXPANDED_FROM


def head_parts(head_dim: int) -> tuple[int, int]:
    """Return the two sizes in which heads are multiplied, powers of two; the second, perhaps padded, may be 0."""
    main = 1 << max(4, head_dim.bit_length() - 1)
    rest = head_dim - main
    return main, 0 if rest <= 0 else max(16, power_of_two(rest))
