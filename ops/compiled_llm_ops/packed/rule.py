"""Which kernel multiplies rows with a packed weight on CUDA, and how it is cut up."""

# The constants were fitted to times of the products of a layer of Qwen3-8B, [6144 x 4096], [24576 x 4096] and
# [4096 x 12288], in bfloat16 with weights from memory, at M 1 to 1,024 on an H200.
# Shapes: M rows, N outputs, K inputs.

from __future__ import annotations

from enum import Enum
from typing import TypeAlias

import torch

from compiled_llm_ops.packed import int4pack
from compiled_llm_ops.packed.formats import TILE_INPUTS, PackedFormat, PackedWeight
from compiled_llm_ops.packed.tilings import (
    FewRowsTiling,
    PackedLinearTiling,
    block_inputs,
    can_be_apart,
    takes_few_rows,
    way_of,
)

MAX_OF_TORCH, MAX_OF_SHORT_GROUPS = 2, 16
"""Rows up to which torch's kernel multiplies with tiles, and with tiles that ours cannot read: groups of 32 and 64."""

MAX_ROWS = {4: 192, 8: 256}
"""Rows up to which codes become numbers in registers, by their bits; more have the weight unpacked once, for cuBLAS."""

FEWEST_ROUNDED = 9
"""Rows from which on rows are rounded to e4m3 for cuBLAS, where the library's formula does so."""

TILES = {8: (64, 4, 4), 16: (128, 3, 4), 32: (64, 4, 4), 64: (64, 4, 4), 128: (128, 3, 8)}
"""Outputs of a tile, blocks on their way and warps, by the rows of a tile."""

FEWEST_TILED_ROWS = 16  # rows of a tile at least, if the weight is in tiles

WAVES = {8: 3.0, 16: 3.0, 32: 3.0, 64: 2.0, 128: 1.0}
"""Programs for each multiprocessor up to which a tile's inputs are split, by the rows of a tile."""

FEWEST_STEPS = 4  # blocks of inputs that a program multiplies at least
MAX_SPLITS = 8

MAX_BLOCK = 128  # inputs that a program multiplies at a time, at most


class Library(Enum):
    """A product by others' kernels."""

    UNPACKED = "unpacked"  # the weight is unpacked, then cuBLAS multiplies
    ROUNDED = "rounded"  # rows are rounded to e4m3, then cuBLAS multiplies by blocks
    TORCH = "torch"  # torch's own kernel for tiles


Choice: TypeAlias = PackedLinearTiling | FewRowsTiling | Library


def choose(m: int, weight: PackedWeight, dtype: torch.dtype, processors: int) -> Choice:
    """Return the way to multiply M rows; ``processors`` is 0 on devices that the kernels were not made for."""
    format = weight.format
    if not processors or dtype is torch.float32:
        return Library.UNPACKED
    if m == 1 and format.code == "e4m3" and takes_few_rows(format):
        return FewRowsTiling(outputs=8, inputs=1024, prefetched=2, warps=4)
    if m >= FEWEST_ROUNDED and dtype is torch.bfloat16 and can_be_rounded(weight):
        return Library.ROUNDED
    inputs = block_inputs(format, MAX_BLOCK)
    short = inputs > 0 and way_of(format, inputs) == "gathered"
    if m <= (MAX_OF_SHORT_GROUPS if short else MAX_OF_TORCH) and dtype is torch.bfloat16 and int4pack.is_taken(weight):
        return Library.TORCH
    if m > MAX_ROWS[format.bits] or not inputs or short:
        return Library.UNPACKED
    return tiling_for(m, format, *weight.shape, processors)


def tiling_for(m: int, format: PackedFormat, n: int, k: int, processors: int) -> PackedLinearTiling:
    """Return how a product on tensor cores is cut up."""
    least = FEWEST_TILED_ROWS if format.layout == "tiles" else min(TILES)
    rows = min(max(TILES), max(least, 1 << (m - 1).bit_length()))
    (outputs, stages, warps), inputs = TILES[rows], block_inputs(format, MAX_BLOCK)
    tiles = -(-m // rows) * -(-n // outputs)
    splits = min(int(WAVES[rows] * processors / tiles), -(-k // inputs) // FEWEST_STEPS, MAX_SPLITS)
    return PackedLinearTiling(rows, outputs, inputs, stages, max(1, splits), warps, can_be_apart(format, inputs))


def can_be_rounded(weight: PackedWeight) -> bool:
    """Whether cuBLAS multiplies rounded rows with a weight, by blocks of 128 inputs and outputs."""
    format, scales, (n, k) = weight.format, weight.scales, weight.shape
    return (
        format.may_round
        and (format.code, format.outputs, format.inputs) == ("e4m3", TILE_INPUTS, TILE_INPUTS)
        and n % TILE_INPUTS == 0
        and k % (4 * TILE_INPUTS) == 0  # rows of scales begin at multiples of 16 bytes
        and scales.dtype is torch.float32
        and scales.is_contiguous()
    )
