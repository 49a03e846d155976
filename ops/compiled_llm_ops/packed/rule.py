"""Which kernel multiplies rows with a packed weight on CUDA, and how it is cut up."""

# The constants were fitted to times of the products of a layer of Qwen3-8B, [6144 x 4096], [24576 x 4096] and
# [4096 x 12288], in bfloat16 with weights from memory, each while the previous one ends, at M 1 to 1,024 on an H200.
# ``tools/fit_tilings.py --only packed`` measures them again, on any GPU; ``tools/packed_rows.py`` tries all rows.
# Shapes: M rows, N outputs, K inputs.

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, TypeAlias

import torch

from compiled_llm_ops.packed.formats import TILE_INPUTS, PackedFormat, PackedWeight
from compiled_llm_ops.packed.tilings import (
    FewRowsTiling,
    PackedLinearTiling,
    RoundedTiling,
    block_inputs,
    can_be_apart,
    can_be_joined,
    is_read_in_blocks,
    joined_inputs,
    takes_few_rows,
    way_of,
)

MAX_BLOCK = 128  # inputs that a program multiplies at a time, at most, where a tile does not say otherwise

MAX_ROWS = 256  # rows up to which codes become numbers in registers; more have the weight unpacked once, for cuBLAS
MAX_JOINED = 512  # the same if codes are joined in order; fewer if sums of less than MAX_BLOCK inputs are scaled

FEWEST_ROUNDED, MAX_ROUNDED = 9, 128
"""Rows from which on rows are rounded to e4m3, where the library's formula does so, and up to which our kernel
multiplies them; cuBLAS does beyond."""

TILE_ROWS = (8, 16, 32, 64, 128)


MAX_OVERLAPPED = 4
"""Rows up to which a product begins while the previous kernel ends, if it may and its tile does not say otherwise."""
# Steps of Qwen3-8B's shape on an H200 were timed with and without. With 1 to 4 rows they take 1 to 10 % less; torchao's
# tiles and GPTQ's words 2 to 7 % up to 64 rows, int8 and e4m3, with rows that are not rounded, 2 to 7 % with 16 to 64,
# NF4 4 to 9 % up to 64, and nearly all 1 to 5 % with 128. With 8 rows e4m3 takes 6 % more, with 16 and 32 int4 3 and
# 8 % and AWQ's words 3 and 12 %, and with 64 NF4 whose scales have 8 bits 3 %. Products of rounded rows always do.


class Tile(NamedTuple):
    """How a product with tiles of so many rows is cut up."""

    outputs: int
    stages: int  # blocks of inputs on their way at a time
    warps: int
    programs: float  # for each multiprocessor, up to which a tile's inputs are split
    apart: bool = False  # whether the places of bytes or words are operands of their own, if they can be
    overlapped: int = MAX_OVERLAPPED


class CodeReading(Enum):
    """How a kernel reads blocks of codes; values are those of ``way_of`` and of layouts."""

    BYTES = "bytes"
    HALVES = "halves"
    WORDS_BY_INPUT = "words_by_input"
    WORDS_BY_OUTPUT = "words_by_output"
    TILES = "tiles"
    GATHERED = "gathered"


_BY_OUTPUT = Tile(64, 4, 4, 3.0)
_BY_INPUT = Tile(128, 3, 4, 3.0, apart=True)
_TILED = Tile(128, 3, 4, 3.0)
_MANY = Tile(64, 3, 4, 3.0)
_MORE = Tile(64, 3, 4, 2.0)
TILES = {
    CodeReading.BYTES: (Tile(64, 4, 4, 3.0), Tile(32, 4, 2, 6.0), Tile(64, 4, 2, 4.0), _MANY, _MORE),
    CodeReading.HALVES: (
        Tile(64, 4, 4, 3.0, apart=True, overlapped=8),
        Tile(64, 4, 2, 6.0, apart=True),
        Tile(64, 4, 2, 6.0, apart=True),
        _MANY,
        _MORE,
    ),
    CodeReading.WORDS_BY_INPUT: (_BY_INPUT, _BY_INPUT, _BY_INPUT, _BY_INPUT, Tile(128, 3, 8, 1.0, apart=True)),
    CodeReading.TILES: (_TILED, _TILED, _TILED, _MANY, _MORE),
    CodeReading.WORDS_BY_OUTPUT: (_BY_OUTPUT, _BY_OUTPUT, _BY_OUTPUT, _MANY, _MORE),
}
"""By how a kernel reads a weight, and by TILE_ROWS."""

FEWEST_ROWS = {CodeReading.TILES: 16, CodeReading.WORDS_BY_OUTPUT: 16}  # rows of a tile at least


class JoinedTile(NamedTuple):
    """How a product whose codes are joined in order is cut up, with tiles of so many rows."""

    rows: int
    outputs: int
    stages: int  # blocks of inputs on their way at a time
    programs: float  # for each multiprocessor, up to which a tile's inputs are split
    warps: int = 4
    overlapped: int = MAX_OVERLAPPED
    inputs: int = MAX_BLOCK  # that a program multiplies at a time, at most


class Joined(NamedTuple):
    """The products with one kind of weight whose codes are joined in order."""

    tiles: tuple[JoinedTile, ...]  # the first that is large enough, and several of the last for more rows
    fewest: int = 1  # rows from which on codes are joined
    most: int = MAX_JOINED  # rows up to which they are


class Groups(Enum):
    """The inputs that share a scale, beside those of a block: a block of short groups has several, or scales sums."""

    LONG = "one group or none has all inputs of a block"
    SHORT = "fewer inputs than a block has"
    OF_64 = "64 inputs, where a block has more"


class JoinedKind(NamedTuple):
    """What decides on the tiles of a weight whose codes are joined."""

    reading: CodeReading
    groups: Groups = Groups.LONG


_64 = JoinedTile(64, 64, 3, 3.0, overlapped=64)
_128 = JoinedTile(128, 64, 3, 2.0, overlapped=128)
_SHORT_64 = JoinedTile(64, 64, 2, 3.0, overlapped=64, inputs=256)
_SHORT_128 = JoinedTile(128, 64, 2, 3.0, overlapped=128)
_SHORT_GROUPS = Joined(
    (JoinedTile(16, 64, 2, 6.0, inputs=256), JoinedTile(32, 64, 2, 6.0, inputs=256), _SHORT_64, _SHORT_128), most=256
)
_GROUPS_OF_64 = Joined(
    (JoinedTile(16, 128, 4, 6.0, inputs=64), JoinedTile(32, 128, 4, 6.0, inputs=64), _SHORT_64, _SHORT_128), most=256
)
JOINED = {
    JoinedKind(CodeReading.BYTES): Joined(
        (JoinedTile(16, 64, 6, 3.0, overlapped=16), JoinedTile(32, 64, 4, 3.0, overlapped=32), _64, _128), fewest=9
    ),
    JoinedKind(CodeReading.HALVES): Joined(
        (JoinedTile(16, 64, 3, 3.0), JoinedTile(32, 64, 3, 3.0), _64, _128), fewest=9
    ),
    JoinedKind(CodeReading.HALVES, Groups.SHORT): _SHORT_GROUPS,
    JoinedKind(CodeReading.HALVES, Groups.OF_64): Joined(
        (JoinedTile(32, 64, 3, 3.0), _SHORT_64, _SHORT_128), fewest=17, most=256
    ),
    JoinedKind(CodeReading.WORDS_BY_INPUT): Joined(
        (JoinedTile(16, 128, 3, 6.0, overlapped=16), JoinedTile(32, 64, 6, 3.0, overlapped=32), _64, _128)
    ),
    JoinedKind(CodeReading.WORDS_BY_INPUT, Groups.SHORT): _SHORT_GROUPS,
    JoinedKind(CodeReading.WORDS_BY_INPUT, Groups.OF_64): _GROUPS_OF_64,
    JoinedKind(CodeReading.WORDS_BY_OUTPUT): Joined(
        (JoinedTile(16, 64, 3, 3.0, overlapped=8), JoinedTile(32, 64, 3, 2.0), _64, _128)
    ),
    JoinedKind(CodeReading.WORDS_BY_OUTPUT, Groups.SHORT): Joined(
        (JoinedTile(16, 128, 4, 6.0, inputs=32), JoinedTile(32, 64, 2, 3.0, inputs=256), _SHORT_64, _SHORT_128),
        most=256,
    ),
    JoinedKind(CodeReading.WORDS_BY_OUTPUT, Groups.OF_64): _GROUPS_OF_64,
    JoinedKind(CodeReading.TILES): Joined(
        (
            JoinedTile(16, 128, 3, 6.0, overlapped=16),
            JoinedTile(32, 128, 3, 6.0, overlapped=32),
            JoinedTile(64, 128, 4, 2.0, overlapped=64),
            JoinedTile(128, 128, 3, 2.0, overlapped=128),
        ),
        most=1024,
    ),
    JoinedKind(CodeReading.TILES, Groups.SHORT): Joined(
        (
            JoinedTile(16, 128, 3, 3.0, overlapped=16),
            JoinedTile(32, 64, 3, 6.0, overlapped=32),
            JoinedTile(64, 64, 3, 3.0, overlapped=64),
            JoinedTile(128, 64, 2, 3.0, overlapped=128),
        ),
        most=1024,
    ),
}
"""By how a kernel reads a weight of other codes than NF4."""

_FEW_OF_NF4 = (
    JoinedTile(8, 64, 3, 6.0, overlapped=8, inputs=256),
    JoinedTile(16, 64, 3, 6.0, overlapped=16, inputs=256),
    JoinedTile(32, 64, 3, 3.0, overlapped=32, inputs=256),
)
NF4 = Joined(
    (
        *_FEW_OF_NF4,
        JoinedTile(64, 64, 2, 3.0, overlapped=64, inputs=256),
        JoinedTile(128, 64, 4, 3.0, overlapped=128, inputs=64),
        JoinedTile(256, 64, 3, 2.0, overlapped=256, inputs=64),
    ),
    most=256,
)
NESTED_NF4 = Joined(
    (
        *_FEW_OF_NF4,
        JoinedTile(64, 64, 2, 3.0, inputs=256),
        JoinedTile(128, 64, 2, 3.0, overlapped=256, inputs=128),
    ),
    most=256,
)
"""Of NF4, with scales of 8 bits."""
# A multiprocessor runs three programs with tiles of 64 x 64 at a time. Codes of NF4 are looked up, which takes long:
# its tiles have up to 256 rows, so that it is done once.


class RoundedTile(NamedTuple):
    """How a product of rows that are rounded is cut up, with tiles of so many rows."""

    rows: int
    outputs: int
    stages: int
    programs: float  # for each multiprocessor, up to which a tile's inputs are split
    warps: int = 4


ROUNDED = (
    RoundedTile(16, 64, 6, 2.0),
    RoundedTile(32, 64, 5, 2.0),
    RoundedTile(64, 64, 4, 2.0),
    RoundedTile(128, 64, 3, 2.0),
)
"""The first that is large enough."""

TWO_ROUNDED = RoundedTile(64, 64, 4, 3.0)  # in place of the largest, for few outputs
MANY_OUTPUTS = 128  # of a multiprocessor, from which on it is the largest

FEWEST_STEPS = 4  # blocks of inputs, of MAX_BLOCK at most, that a program multiplies at least
MAX_SPLITS = 8


class Library(Enum):
    """A product by others' kernels."""

    UNPACKED = "unpacked"  # the weight is unpacked, then cuBLAS multiplies
    ROUNDED = "rounded"  # rows are rounded to e4m3, then cuBLAS multiplies by blocks


Choice: TypeAlias = PackedLinearTiling | RoundedTiling | FewRowsTiling | Library


def choose(m: int, weight: PackedWeight, dtype: torch.dtype, processors: int) -> Choice:
    """Return the way to multiply M rows; ``processors`` is 0 on devices that the kernels were not made for."""
    format = weight.format
    if not processors or dtype is torch.float32:
        return Library.UNPACKED
    if m == 1 and format.code == "e4m3" and takes_few_rows(format):
        return FewRowsTiling(outputs=8, inputs=1024, prefetched=2, warps=4)
    if m >= FEWEST_ROUNDED and dtype is torch.bfloat16 and can_be_rounded(weight):
        return rounded_tiling_for(m, weight, processors) if m <= MAX_ROUNDED else Library.ROUNDED
    inputs = block_inputs(format, MAX_BLOCK)
    joined = joined_of(weight, dtype) if inputs > 0 else None
    if joined is None or m < joined.fewest:
        plain = inputs > 0 and _reading(format, inputs) is not CodeReading.GATHERED and m <= MAX_ROWS
        return tiling_for(m, format, *weight.shape, processors) if plain else Library.UNPACKED
    most = joined.most * joined_inputs(weight, dtype, MAX_BLOCK) // MAX_BLOCK
    return _joined_tiling(m, weight, dtype, joined, processors) if m <= most else Library.UNPACKED


def tiling_for(m: int, format: PackedFormat, n: int, k: int, processors: int) -> PackedLinearTiling:
    """Return how a product on tensor cores is cut up, whose codes are not joined by the kernel for that."""
    inputs = block_inputs(format, MAX_BLOCK)
    reading = _reading(format, inputs)
    rows = next((rows for rows in TILE_ROWS if rows >= max(m, FEWEST_ROWS.get(reading, 0))), TILE_ROWS[-1])
    tile = TILES[reading][TILE_ROWS.index(rows)]
    splits = splits_for(tile.programs * processors, -(-m // rows) * -(-n // tile.outputs), -(-k // inputs))
    apart = tile.apart and can_be_apart(format, inputs)
    return PackedLinearTiling(
        rows, tile.outputs, inputs, tile.stages, splits, tile.warps, apart, overlap=m <= tile.overlapped
    )


def joined_of(weight: PackedWeight, dtype: torch.dtype) -> Joined | None:
    """Return how a weight's codes are joined, for rows of this type; None if they are not."""
    if not can_be_joined(weight, dtype):
        return None
    format = weight.format
    if format.code == "nf4":
        return NF4 if weight.nested is None else NESTED_NF4
    reading, groups = _reading(format, MAX_BLOCK), Groups.LONG
    if 0 < format.inputs < joined_inputs(weight, dtype, MAX_BLOCK):
        groups = Groups.OF_64 if format.inputs == 64 and reading is not CodeReading.TILES else Groups.SHORT
    return JOINED[JoinedKind(reading, groups)]


def _joined_tiling(
    m: int, weight: PackedWeight, dtype: torch.dtype, joined: Joined, processors: int
) -> PackedLinearTiling:
    """Return how a product is cut up whose codes are joined in order."""
    n, k = weight.shape
    tile = next((tile for tile in joined.tiles if tile.rows >= m), joined.tiles[-1])
    inputs = joined_inputs(weight, dtype, tile.inputs)
    tiles, steps = -(-m // tile.rows) * -(-n // tile.outputs), -(-k // min(inputs, MAX_BLOCK))
    splits = splits_for(tile.programs * processors, tiles, steps)
    return PackedLinearTiling(
        tile.rows, tile.outputs, inputs, tile.stages, splits, tile.warps, joined=True, overlap=m <= tile.overlapped
    )


def rounded_tiling_for(m: int, weight: PackedWeight, processors: int) -> RoundedTiling:
    """Return how a product of rows that are rounded is cut up."""
    n, k = weight.shape
    tile = next(tile for tile in ROUNDED if tile.rows >= m)
    if tile is ROUNDED[-1] and n < MANY_OUTPUTS * processors:
        tile = TWO_ROUNDED
    splits = splits_for(tile.programs * processors, -(-m // tile.rows) * -(-n // tile.outputs), k // MAX_BLOCK)
    return RoundedTiling(tile.rows, tile.outputs, tile.stages, splits, tile.warps)


def splits_for(programs: float, tiles: int, steps: int) -> int:
    """Return among how many programs a tile's inputs are split, of so many in all, with so many blocks of inputs."""
    return max(1, min(int(programs / tiles), steps // FEWEST_STEPS, MAX_SPLITS))


def _reading(format: PackedFormat, inputs: int) -> CodeReading:
    """Return how a kernel reads blocks of so many inputs."""
    way = way_of(format, inputs)
    return CodeReading(format.layout if way == "planes" else way)


def can_be_rounded(weight: PackedWeight) -> bool:
    """Whether rounded rows are multiplied with a weight, by our kernel and by cuBLAS: by blocks of 128 x 128."""
    format, codes, scales, _, (n, k), _ = weight
    return (
        format.may_round
        and (format.code, format.outputs, format.inputs) == ("e4m3", TILE_INPUTS, TILE_INPUTS)
        and n % TILE_INPUTS == 0
        and k % (4 * TILE_INPUTS) == 0  # rows of scales begin at multiples of 16 bytes
        and scales.dtype is torch.float32
        and scales.is_contiguous()
        and is_read_in_blocks(codes)
    )
