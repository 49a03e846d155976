"""How a matmul with a packed weight is cut up for the Triton kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_llm_ops.packed.formats import TILE_PIECE, PackedFormat, PackedWeight


class PackedLinearTiling(NamedTuple):
    """One way to cut a matmul up; a program multiplies a tile of rows with some outputs, over a part of the inputs."""

    rows: int  # of a tile, padded
    outputs: int  # outputs in a tile
    inputs: int  # inputs that a program multiplies at a time
    stages: int  # blocks of inputs on their way at a time
    splits: int  # programs that share a tile's inputs
    warps: int
    apart: bool = False  # whether the places of bytes or words are operands of their own
    joined: bool = False  # whether blocks come by TMA, and codes become numbers in the order of the inputs
    overlap: bool = True  # whether it begins while the previous kernel ends, if it may


def way_of(format: PackedFormat, inputs: int) -> str:
    """Return how a kernel reads blocks of so many inputs: by bytes, their halves, planes of words, or one by one."""
    if format.layout in ("rows", "high_first"):
        return "bytes" if format.bits == 8 else "halves"
    if format.bits == 8 or (format.layout == "tiles" and inputs % 128):
        return "gathered"
    return "planes"


def can_be_apart(format: PackedFormat, inputs: int) -> bool:
    """Whether the places of bytes or words can be operands of their own, with 16 inputs of a block each at least."""
    way = way_of(format, inputs)
    return way == "halves" or (way == "planes" and format.layout != "words_by_output" and inputs % 128 == 0)


def can_be_joined(weight: PackedWeight, dtype: torch.dtype) -> bool:
    """Whether the kernel that joins codes in the order of the inputs takes a weight, and rows of this type."""
    format, codes, scales, zeros, (_, k), _ = weight
    if dtype not in (torch.bfloat16, torch.float16) or (format.code == "e4m3" and dtype is torch.float16):
        return False
    if format.bits == 8 and (format.layout != "rows" or zeros is not None):
        return False
    if format.layout == "tiles" and format.inputs % TILE_PIECE:
        return False
    if format.code == "nf4" and not (format.outputs == 1 and format.inputs):
        return False  # each output has a scale for some inputs
    if zeros is not None and zeros.is_floating_point() and not (scales.dtype == zeros.dtype == dtype):
        return False  # values are scaled as numbers of the rows' type, as torch's kernel for tiles does
    return k % 8 == 0 and is_read_in_blocks(codes)


def is_read_in_blocks(codes: Tensor) -> bool:
    """Whether blocks of codes can come by TMA: their rows begin at multiples of 16 bytes."""
    row = codes[0].numel() * codes.itemsize if codes.dim() > 1 else 0
    return row % 16 == 0 and codes.data_ptr() % 16 == 0


FEWEST_HALVED = 32
"""Rows of a tile at least whose halves may overlap; smaller ones lose no time to rows that are not there."""

MOST_TOGETHER, OUTPUTS_TOGETHER = 3, 128
"""Weights of one launch at most, and what the outputs of all but the last have to be a multiple of."""


def can_be_together(weights: Sequence[PackedWeight], dtype: torch.dtype) -> bool:
    """Whether one launch of the kernel that joins codes multiplies rows of this type with several weights."""
    return fit_together(weights) and all(can_be_joined(weight, dtype) for weight in weights)


def fit_together(weights: Sequence[PackedWeight]) -> bool:
    """Whether weights are few enough for one launch, alike but for outputs that fill its tiles, and read in blocks."""
    format = weights[0].format
    return (
        len(weights) <= MOST_TOGETHER
        and (format.layout != "tiles" and format.outputs == 1)
        and not any(weight.shape[0] % OUTPUTS_TOGETHER for weight in weights[:-1])
        and len({_kind_of(weight) for weight in weights}) == 1
        and all(is_read_in_blocks(weight.codes) for weight in weights)
    )


def _kind_of(weight: PackedWeight) -> tuple[object, ...]:
    """Return what has to be the same of weights of one launch."""
    tables = (
        None if table is None else (table.dtype, table.device, table.stride(0))
        for table in (weight.scales, weight.zeros)
    )
    return weight.format, weight.shape[1], weight.nested is None, *tables


def block_inputs(format: PackedFormat, most: int) -> int:
    """Return the largest power of two up to ``most`` that divides the inputs that share a scale; 0 if that is odd."""
    size = most
    while format.inputs and format.inputs % size:
        size //= 2
    return size if size >= 32 else 0


def has_scaled_numbers(weight: PackedWeight, inputs: int) -> bool:
    """Whether numbers are scaled before they are multiplied, not sums, with so many inputs in a block."""
    floating = weight.zeros is not None and weight.zeros.is_floating_point()
    return weight.format.code == "nf4" or floating or 0 < weight.format.inputs < inputs


def joined_inputs(weight: PackedWeight, dtype: torch.dtype, most: int) -> int:
    """Return the inputs of a block of the kernel that joins codes, a power of two up to ``most``."""
    format, group = weight.format, weight.format.inputs
    scaled = format.code == "nf4" or (format.bits == 4 and format.outputs == 1 and weight.scales.dtype == dtype)
    if scaled and 16 <= group < most and group & (group - 1) == 0:
        return most  # numbers are scaled, so that a block may have several groups
    return block_inputs(format, most)


class RoundedTiling(NamedTuple):
    """The way to cut up a matmul of rows that are rounded to e4m3; a block has the inputs that share scales."""

    rows: int  # of a tile
    outputs: int  # in a tile, of which a block has one scale
    stages: int  # blocks of inputs on their way at a time
    splits: int  # programs that share a tile's inputs
    warps: int


class FewRowsTiling(NamedTuple):
    """The way to cut up a matmul of one or two rows; a program computes some outputs over all inputs."""

    outputs: int
    inputs: int  # inputs that a program multiplies at a time
    prefetched: int  # blocks of weights that it loads before the previous kernel has ended
    warps: int


def takes_few_rows(format: PackedFormat) -> bool:
    """Whether the kernel without tensor cores reads a format: 8 bits in rows, with scales of rows or of blocks."""
    return format.bits == 8 and format.layout == "rows" and (format.inputs == 0 or format.outputs % 16 == 0)
