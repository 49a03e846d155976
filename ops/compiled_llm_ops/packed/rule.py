"""Which kernel multiplies rows with a packed weight on CUDA, and how it is cut up."""

# Shapes: M rows, N outputs, K inputs.

from __future__ import annotations

from enum import Enum

import torch

from compiled_llm_ops.packed.formats import TILE_INPUTS, PackedWeight
from compiled_llm_ops.packed.tilings import FewRowsTiling, PackedLinearTiling, block_inputs, takes_few_rows

MAX_ROWS = 256  # rows up to which codes are unpacked in registers; from there on once, for cuBLAS

FEWEST_ROUNDED = 16
"""Rows from which on rows are rounded to e4m3 for cuBLAS, where the library's formula does so."""

FEW_ROWS = 2  # rows that are multiplied without tensor cores, if codes have 8 bits

WAVES = 2  # programs for each multiprocessor up to which tiles are split along the inputs
FEWEST_STEPS = 4  # blocks of inputs that a program multiplies at least


class Library(Enum):
    """A product by others' kernels."""

    UNPACKED = "unpacked"  # the weight is unpacked, then cuBLAS multiplies
    ROUNDED = "rounded"  # rows are rounded to e4m3, then cuBLAS multiplies by blocks


def choose(
    m: int, weight: PackedWeight, dtype: torch.dtype, processors: int
) -> PackedLinearTiling | FewRowsTiling | Library:
    """Return the way to multiply M rows; ``processors`` is 0 on devices that the kernels were not made for."""
    format, n, k = weight.format, *weight.shape
    if not processors or dtype is torch.float32:
        return Library.UNPACKED
    if m <= FEW_ROWS and takes_few_rows(format):
        return FewRowsTiling(4, 1024, min(4, -(-k // 1024)), 4)
    if m >= FEWEST_ROUNDED and dtype is torch.bfloat16 and can_be_rounded(weight):
        return Library.ROUNDED
    inputs = block_inputs(format, 128)
    if m > MAX_ROWS or not inputs:
        return Library.UNPACKED
    rows = min(64, max(8, 1 << (m - 1).bit_length()))
    programs = -(-m // rows) * -(-n // 64)
    splits = min(WAVES * processors // programs, -(-k // inputs) // FEWEST_STEPS, 8)
    return PackedLinearTiling(rows, 64, inputs, 4, max(1, splits), 4)


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
