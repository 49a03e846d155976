"""How the matmul of ``invariant_linear`` is tiled: by the weight's shape and dtype, never by the number of rows."""

# The order of the sums follows from BLOCK of the inputs, so all rows share the tiling, those of decode steps and those
# of prefills: it is the one that is good for both. Fitted on an H100, to 32, 256 and 2,048 rows and the weights of
# Qwen3-0.6B and 8B: at each of them 1.13 to 1.23 times the time of the tiling that is best there, on average.
# ``tools/fit_tilings.py --only invariant-linear`` measures that again.
# Shapes: N outputs, K inputs.

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

ROWS = 64  # rows of a tile: what one instruction of a tensor core takes

BLOCK, BLOCK_OF_FLOAT32 = 128, 32  # inputs that are multiplied at a time

NARROWEST, NARROW, WIDEST = 16, 64, 128  # outputs of a tile

FEW_OUTPUTS = 2048  # outputs of a weight up to which tiles are narrow, so that there are more of them

RESERVED = 28 * 1024  # bytes of a multiprocessor's shared memory that the pipeline leaves

MAX_STAGES, STAGES_OF_FLOAT32 = 6, 2  # stages of the pipeline, at most. They do not change the order of the sums.

WARPS = 4

SUMMED = 1024  # numbers that a program of ``invariant_sum`` adds at a time

GROUPED = 8  # tiles of rows that follow each other with the same weights, which they read from the cache


class InvariantLinearTiling(NamedTuple):
    """Tiles of the matmul."""

    rows: int
    outputs: int
    inputs: int  # multiplied at a time
    stages: int
    warps: int


def invariant_linear_tiling(outputs: int, number_bytes: int, shared_memory: int) -> InvariantLinearTiling:
    """Return the tiling for a weight of numbers of so many bytes; shared memory is in bytes, too."""
    width = NARROW if outputs <= FEW_OUTPUTS or number_bytes > 2 else WIDEST
    while width > NARROWEST and outputs <= width // 2:
        width //= 2
    if number_bytes > 2:
        return InvariantLinearTiling(ROWS, width, BLOCK_OF_FLOAT32, STAGES_OF_FLOAT32, WARPS)
    stages = (shared_memory - RESERVED) // ((ROWS + width) * BLOCK * number_bytes)
    return InvariantLinearTiling(ROWS, width, BLOCK, max(2, min(MAX_STAGES, stages)), WARPS)


@functools.cache
def shared_memory_of(device: torch.device) -> int:
    """Return the bytes of shared memory of a multiprocessor."""
    return int(torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor)
