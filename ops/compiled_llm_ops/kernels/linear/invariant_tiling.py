"""How the matmul of ``invariant_linear`` is tiled, so that a row has the same bits among any number of rows."""

# Of 16 bits, Hopper's tensor cores add 16 products at a time to what they have, in ascending order of the inputs, in
# each of their instructions, whichever of both matrices comes first. So tiles may follow from the number of rows there,
# as long as one program has all inputs of its outputs. On an H200 23 tilings, all kinds of TILES among them, gave equal
# bits for 300 rows and three weights; ``tests/ops/invariant/test_invariant_gpu.py`` compares more. Elsewhere that was
# not seen, and all rows share the tiling that the weight's shape and dtype decide.
# Shapes: M rows, N outputs, K inputs.

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from compiled_llm_ops.kernels.pdl import is_hopper

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
    swapped: bool = False  # whether outputs are rows of the product: tensor cores multiply 64 of these at least


class LinearDevice(NamedTuple):
    """What a tiling follows from, of a device."""

    shared_memory: int  # bytes of a multiprocessor
    processors: int
    hopper: bool


TILES = (
    InvariantLinearTiling(256, 128, 64, 4, 8, swapped=True),
    InvariantLinearTiling(128, 128, 64, 4, 8),
    InvariantLinearTiling(64, 128, 128, 4, 4),
    InvariantLinearTiling(64, 128, 64, 4, 4),  # of which two fit into a multiprocessor
    InvariantLinearTiling(64, 64, 128, 6, 4),
    InvariantLinearTiling(32, 64, 256, 4, 4, swapped=True),
    InvariantLinearTiling(16, 128, 128, 5, 4, swapped=True),
    InvariantLinearTiling(16, 64, 256, 4, 4, swapped=True),
)
"""Those for Hopper, the largest first."""

HEADS_TILE, HEADS_TILE_OF_FLOAT32 = InvariantLinearTiling(64, 64, 64, 3, 4), InvariantLinearTiling(16, 32, 32, 2, 4)
"""Those of ``invariant_bmm``, for any number of rows; not measured yet."""

PRODUCTS, NUMBERS = 1400, 32
"""What a multiprocessor multiplies, and reads from the cache, in about the same time."""

TIE = 1.05  # how much longer a larger tile may take to be chosen


def invariant_linear_tiling(
    rows: int, outputs: int, number_bytes: int, device: LinearDevice, described: bool = True
) -> InvariantLinearTiling:
    """Return the tiling for M rows and a weight of numbers of so many bytes; ``described``: read by descriptors."""
    if device.hopper and described and number_bytes == 2:
        return _fastest(rows, outputs, device)
    width = NARROW if outputs <= FEW_OUTPUTS or number_bytes > 2 else WIDEST
    while width > NARROWEST and outputs <= width // 2:
        width //= 2
    if number_bytes > 2:
        return InvariantLinearTiling(ROWS, width, BLOCK_OF_FLOAT32, STAGES_OF_FLOAT32, WARPS)
    stages = (device.shared_memory - RESERVED) // ((ROWS + width) * BLOCK * number_bytes)
    return InvariantLinearTiling(ROWS, width, BLOCK, max(2, min(MAX_STAGES, stages)), WARPS)


def _fastest(rows: int, outputs: int, device: LinearDevice) -> InvariantLinearTiling:
    """Return the tiling that ends first, by how often a multiprocessor takes a tile, and how long it takes for one."""
    # On an H200, with 1, 8, 64, 128, 256, 1,024 and 2,048 rows and the weights of Qwen3-0.6B and 8B, it was the fastest
    # of 23, or nearly so; the one tiling that all rows shared before took up to 1.7 times as long.
    times = [_time_of(tile, rows, outputs, device) for tile in TILES]
    return next(tile for tile, time in zip(TILES, times, strict=True) if time <= TIE * min(times))


def _time_of(tile: InvariantLinearTiling, rows: int, outputs: int, device: LinearDevice) -> float:
    each = max(tile.rows * tile.outputs / PRODUCTS, (tile.rows + tile.outputs) / NUMBERS)
    times = -(-rows // tile.rows) * -(-outputs // tile.outputs) / device.processors
    alone = 2 * (tile.rows + tile.outputs) * tile.inputs * tile.stages > device.shared_memory // 2 - RESERVED // 2
    return each * (-(-times // 1) if alone else max(1.0, times))


@functools.cache
def linear_device_of(device: torch.device) -> LinearDevice:
    """Return the numbers of a device, read once."""
    properties = torch.cuda.get_device_properties(device)
    return LinearDevice(
        int(properties.shared_memory_per_multiprocessor), properties.multi_processor_count, is_hopper(device)
    )
