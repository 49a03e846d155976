"""How a product of few rows with a weight is cut up for the Triton kernels, or that cuBLAS is better at it.

Shapes: M rows, N outputs, K inputs.
"""

from __future__ import annotations

from typing import NamedTuple

TILE, BLOCK = 64, 128
MOST_ROWS = 64
SHARED_MEMORY = 227 * 1024
"""Bytes a multiprocessor of compute capability 9.0 has."""


class Tiling(NamedTuple):
    """One way to cut a product up; a program multiplies all rows with a tile of the weight.

    Attributes:
        rows: rows the tile has room for; 2 stands for the kernel without tensor cores.
        outputs: outputs in a tile.
        inputs: inputs that a program multiplies at a time.
        splits: programs that share a tile, each with a range of the inputs.
        stages: blocks of inputs on their way at a time.
        prefetch: whether a program asks for its first weights before the kernel in front has ended.
    """

    rows: int
    outputs: int
    inputs: int
    splits: int
    stages: int
    prefetch: bool


def choose(m: int, n: int, k: int, processors: int = 132) -> Tiling | None:
    """Return the tiling for ``[M, K] @ [N, K].T``, or None where cuBLAS is as fast or nothing fits.

    The rules are fitted to times of all decode products of Qwen3-0.6B and -8B in bfloat16 at M 1 to 64 on an H200,
    with weights from memory, each alone and behind the norm in front of it. What they say in short: read the weight
    in one wave of programs or in many.

    Args:
        m: rows.
        n: outputs.
        k: inputs.
        processors: multiprocessors of the device.
    """
    if not 1 <= m <= MOST_ROWS or n % 16 or k % BLOCK:
        return None
    tiles, blocks = -(-n // TILE), k // BLOCK
    if m <= 2 and (tiling := _without_tensor_cores(n, k, processors)):
        return tiling
    # A sum over splits costs about as long as reading 8 blocks.
    splits = max(1, min(processors // tiles, blocks // 4, 8)) if blocks >= 16 else 1
    rows = max(16 if splits <= 2 else 8, 1 << (m - 1).bit_length())
    programs = tiles * splits
    waves = -(-programs // processors)
    # Multiprocessors with one program less than others end early. cuBLAS has other tiles for that, but is slow itself
    # with weights below 16 MB, if only a third of the multiprocessors have something to do at all.
    uneven = programs < (0.85 * waves if n * k >= 2**23 else 1 / 3) * processors
    if uneven or (rows == MOST_ROWS and splits > 2):
        return None
    # One wave: as much on its way as fits. Several: three programs on a multiprocessor at once, so that one of them
    # always reads.
    stages = 5 if waves == 1 else SHARED_MEMORY // 3 // ((TILE + rows) * BLOCK * 2)
    return Tiling(rows, TILE, BLOCK, splits, stages, prefetch=waves == 1)


def _without_tensor_cores(n: int, k: int, processors: int) -> Tiling | None:
    """Return the tiling with the smallest tiles of which four on each multiprocessor are all, if there is one."""
    for outputs, inputs in ((4, 1024), (8, 512), (16, 256)):
        if n <= 4 * processors * outputs and k % inputs == 0:
            return Tiling(2, outputs, inputs, splits=1, stages=min(4, k // inputs), prefetch=False)
    return None
