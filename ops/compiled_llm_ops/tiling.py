"""How a product of few rows with a weight is cut up for the Triton kernels, or that cuBLAS is better at it.

Shapes: M rows, N outputs, K inputs.
"""

from __future__ import annotations

from typing import NamedTuple

TILE, BLOCK = 64, 128
MOST_ROWS = 64
WIDE_BLOCK = 1024
"""Inputs that a program without tensor cores multiplies at a time."""

EARLY_NUMBERS = 2**14
"""Weights that a program of 128 threads holds in registers, two in each: 64 registers of a thread."""

MOST_OUTPUTS_OF_TWO = 64
"""Outputs for each multiprocessor up to which two rows are multiplied without tensor cores."""

SHARED_MEMORY = 227 * 1024
"""Bytes a multiprocessor of compute capability 9.0 has."""


class Tiling(NamedTuple):
    """One way to cut a product up; a program multiplies all rows with a tile of the weight.

    Attributes:
        rows: rows the tile has room for; 1 and 2 stand for the kernel without tensor cores.
        outputs: outputs in a tile.
        inputs: inputs that a program multiplies at a time.
        splits: programs that share a tile, each with a range of the inputs.
        stages: blocks of inputs on their way at a time, with tensor cores.
        early: blocks of weights that a program asks for before the kernel in front has ended.
    """

    rows: int
    outputs: int
    inputs: int
    splits: int
    stages: int
    early: int


def choose(m: int, n: int, k: int, processors: int = 132) -> Tiling | None:
    """Return the tiling for ``[M, K] @ [N, K].T``, or None where cuBLAS is as fast or nothing fits.

    The rules are fitted to times of all decode products of Qwen3-0.6B and -8B in bfloat16 at M 1 to 64 on an H200,
    with weights from memory, each alone and behind the norm in front of it. What they say in short: read the weight
    in one wave of programs or in many. Two rows take the tilings measured with one.

    Args:
        m: rows.
        n: outputs.
        k: inputs.
        processors: multiprocessors of the device.
    """
    if m == 1 or (m == 2 and n <= MOST_OUTPUTS_OF_TWO * processors):
        return _without_tensor_cores(m, n, k, processors)
    if not 2 <= m <= MOST_ROWS or n % 16 or k % BLOCK:
        return None
    tiles, blocks = -(-n // TILE), k // BLOCK
    # A sum over splits costs about as long as reading 8 blocks.
    splits = max(1, min(processors // tiles, blocks // 4, 8)) if blocks >= 16 else 1
    rows = max(16 if splits <= 2 else 8, 1 << (m - 1).bit_length())
    programs = tiles * splits
    waves = -(-programs // processors)
    # Multiprocessors with one program less than others end early. cuBLAS has other tiles for that, but is slow itself
    # with weights below 16 MB, if only a third of the multiprocessors have something to do at all; with many rows it
    # gains less from them.
    many = waves == 1 and rows >= 32
    uneven = programs < ((0.7 if many else 0.85 * waves) if n * k >= 2**23 else 1 / 3) * processors
    if uneven or (rows == MOST_ROWS and splits > 2):
        return None
    # One wave: as much on its way as fits. Several: three programs on a multiprocessor at once, so that one of them
    # always reads.
    stages = 5 + many if waves == 1 else SHARED_MEMORY // 3 // ((TILE + rows) * BLOCK * 2)
    return Tiling(rows, TILE, BLOCK, splits, stages, early=2 if waves == 1 and not many else 0)


def _without_tensor_cores(m: int, n: int, k: int, processors: int) -> Tiling | None:
    """Return the tiling of a kernel whose programs hold all their weights before they wait, where registers suffice."""
    if k % 16:
        return None
    outputs = 4 if n >= 16 * processors else 2
    blocks = -(-k // WIDE_BLOCK)
    if blocks * outputs * WIDE_BLOCK <= EARLY_NUMBERS:
        return Tiling(m, outputs, WIDE_BLOCK, splits=1, stages=1, early=blocks)
    return Tiling(m, outputs, 2 * WIDE_BLOCK, splits=1, stages=1, early=1)
