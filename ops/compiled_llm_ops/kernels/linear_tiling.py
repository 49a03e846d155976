"""How a product of few rows with a weight is cut up for the Triton kernels, or that cuBLAS is better at it.

Shapes: M rows, N outputs, K inputs.
"""

from __future__ import annotations

from typing import NamedTuple

TILE, BLOCK = 64, 128
MOST_ROWS = 64
MOST_TILES = 3
"""Tiles of a program: their sums are 96 registers of a thread, with 64 rows."""

WIDE_BLOCK = 1024
"""Inputs that a program without tensor cores multiplies at a time."""

EARLY_NUMBERS = 2**14
"""Weights that a program of 128 threads holds in registers, two in each: 64 registers of a thread."""

MOST_OUTPUTS_OF_TWO = 16
"""Outputs for each multiprocessor up to which two rows are multiplied without tensor cores."""

LEAST_OUTPUTS = 7
"""Outputs for each multiprocessor from which on tensor cores were measured to be faster than cuBLAS."""

FEW_NORMING = 8
"""Programs for each multiprocessor from which on half as many, with twice the outputs, norm the row faster."""

MOST_NORMING = 16
"""Programs for each multiprocessor that may each norm the row: about as many as run at a time."""

SHARED_MEMORY = 226 * 1024
"""Bytes for blocks in a multiprocessor of compute capability 9.0; it has 1 KB more, for barriers."""


class Tiling(NamedTuple):
    """One way to cut a product up; a program multiplies all rows with a part of the weight, over all inputs.

    Attributes:
        rows: rows there is room for; 1 and 2 stand for the kernel without tensor cores.
        outputs: outputs in a tile.
        tiles: tiles of a program.
        inputs: inputs that a program multiplies at a time.
        stages: blocks of inputs on their way at a time, with tensor cores.
        early: without tensor cores, blocks of weights that a program asks for before the kernel in front has ended;
            with them it fills its stages.
    """

    rows: int
    outputs: int
    tiles: int
    inputs: int
    stages: int
    early: int


def choose(m: int, n: int, k: int, processors: int = 132) -> Tiling | None:
    """Return the tiling for ``[M, K] @ [N, K].T``, or None where cuBLAS is as fast or nothing fits.

    The rules are fitted to times of all decode products of Qwen3-0.6B and -8B in bfloat16 at M 1 to 64 on an H200,
    with weights from memory, each behind a small kernel or the norm in front of it. What they say in short: one program
    on a multiprocessor, with as many bytes on their way as it holds, and no sum over programs.

    Args:
        m: rows.
        n: outputs.
        k: inputs.
        processors: multiprocessors of the device.
    """
    if m == 1 or (m == 2 and n <= MOST_OUTPUTS_OF_TWO * processors):
        return _without_tensor_cores(m, n, k, processors)
    if not 2 <= m <= MOST_ROWS or n % 16 or k % BLOCK or n < LEAST_OUTPUTS * processors:
        return None
    rows, outputs = max(16, 1 << (m - 1).bit_length()), TILE
    # Few programs read fast enough if each has much on its way; with 64 rows it has half as much.
    while rows == MOST_ROWS and outputs > 16 and 5 * n < 2 * outputs * processors:
        outputs //= 2
    tiles = min(MOST_TILES, -(-n // (outputs * processors)))
    inputs = BLOCK if _fitting(rows, outputs * tiles, 2 * BLOCK) < 4 else 2 * BLOCK
    return Tiling(rows, outputs, tiles, inputs, _fitting(rows, outputs * tiles, inputs), early=0)


def _fitting(rows: int, outputs: int, inputs: int) -> int:
    """Return how many blocks of rows and weights a multiprocessor holds."""
    return SHARED_MEMORY // ((rows + outputs) * inputs * 2)


def _without_tensor_cores(m: int, n: int, k: int, processors: int) -> Tiling | None:
    """Return the tiling of a kernel whose programs hold all their weights before they wait, where registers suffice."""
    if k % 16:
        return None
    outputs = 4 if n >= 16 * processors else 2
    blocks = -(-k // WIDE_BLOCK)
    if blocks * outputs * WIDE_BLOCK <= EARLY_NUMBERS:
        return Tiling(m, outputs, 1, WIDE_BLOCK, stages=1, early=blocks)
    return Tiling(m, outputs, 1, 2 * WIDE_BLOCK, stages=1, early=1)


def choose_normed(n: int, k: int, processors: int = 132) -> Tiling | None:
    """Return the tiling of a product of one row that each program norms, None where too many would do so.

    Fitted to times of Qwen3-0.6B's decode step, with the kernels of its layers one behind the other.

    Args:
        n: outputs.
        k: inputs.
        processors: multiprocessors of the device.
    """
    tiling = choose(1, n, k, processors)
    if tiling is None or tiling.early * tiling.inputs < k:
        return None
    twice = tiling._replace(outputs=2 * tiling.outputs)
    fits = 2 * twice.outputs * tiling.early * tiling.inputs <= EARLY_NUMBERS  # beside the row itself
    if fits and n > FEW_NORMING * tiling.outputs * processors:
        tiling = twice
    return tiling if n <= MOST_NORMING * tiling.outputs * processors else None
