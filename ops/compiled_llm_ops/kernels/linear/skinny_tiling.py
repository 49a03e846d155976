"""How a matmul of few rows with a weight is cut up for the Triton kernels, or that cuBLAS is faster."""

# The constants of ``choose_linear_tiling`` were fitted to times of all matmuls of Qwen3-0.6B and -8B in bfloat16, at M
# 1 to 64 on an H200 and at M 96 to 512 on an H100, with weights from memory, each after a small kernel or its norm.
# Those of ``choose_normed_tiling`` were fitted to times of Qwen3-0.6B's decode step, with the kernels of its layers one
# after the other. ``tools/fit_tilings.py --only linear,normed`` measures matmuls again, on any GPU.
# Shapes: M rows, N outputs, K inputs.

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_llm_ops.contracts.devices import power_of_two

TILE, BLOCK = 64, 128
"""Outputs of a tile, which is what tensor cores take of their first operand, and inputs of a block."""

TILE_ROWS, MAX_ROWS = 64, 512  # rows of the largest tile, and rows up to which the kernels were measured

FULL_TILES, BUSY = 0.85, 0.36
"""The part of tiles that more rows than TILE_ROWS have to fill, and of multiprocessors that are to be busy."""
# With 96 rows, a quarter of the products is for nothing, and cuBLAS is up to 15% faster.

MAX_TILES = 3  # tiles of a program: their sums are 96 registers of a thread, with 64 rows

FEWEST_STAGES = 4  # stages that have to fit for blocks of inputs to be twice as wide

FEWEST_FULL_TILES = 0.4
"""Tiles for each multiprocessor below which 64 rows take smaller tiles."""
# Few programs read fast enough only if each loads much at a time, and with 64 rows it has room for half as much.

WIDE_BLOCK = 1024  # inputs that a program without tensor cores multiplies at a time

PREFETCHED_WEIGHTS = 2**14
"""Weights that a program of 128 threads holds in registers, two in each: 64 registers of a thread."""

FEW_OUTPUTS, MANY_OUTPUTS = 2, 4  # outputs of a program without tensor cores

LEAST_FOR_MANY = 16
"""Outputs for each multiprocessor from which on a program without tensor cores computes MANY_OUTPUTS."""

MAX_OUTPUTS_OF_TWO = 16  # outputs for each multiprocessor up to which two rows are multiplied without tensor cores

LEAST_OUTPUTS = 7  # outputs for each multiprocessor from which on tensor cores were measured to be faster than cuBLAS

FEW_NORMING = 8
"""Programs for each multiprocessor from which on half as many, with twice the outputs, norm the row faster."""

MAX_NORMING = 16  # programs for each multiprocessor that may each norm the row: about as many as run at a time

SHARED_MEMORY = 226 * 1024
"""Bytes for blocks in a multiprocessor of compute capability 9.0; it has 1 KB more, for barriers."""


class LinearTiling(NamedTuple):
    """One way to cut a matmul up; a program multiplies a tile of rows with a part of the weight, over all inputs."""

    rows: int  # of a tile; 1 and 2 stand for the kernel without tensor cores
    outputs: int  # outputs in a tile
    tiles: int  # tiles of a program
    inputs: int  # inputs that a program multiplies at a time
    stages: int  # blocks of inputs on their way at a time, with tensor cores
    # blocks of weights that a program loads before the previous kernel has ended; 0 with tensor cores, where the stages
    # are filled
    prefetched: int


@functools.cache
def processors_of(device: torch.device) -> int:
    """Return how many multiprocessors the device has, 0 if the kernels were not made for it."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count


def tiling_for(rows: int, weight: Tensor) -> LinearTiling | None:
    """Return how our kernels cut up a matmul of so many rows with ``weight`` ``[N, K]``, None if cuBLAS does it."""
    processors = processors_of(weight.device)
    if not processors or weight.dtype not in (torch.float16, torch.bfloat16):
        return None
    return choose_linear_tiling(rows, weight.shape[0], weight.shape[1], processors)


def choose_linear_tiling(m: int, n: int, k: int, processors: int = 132) -> LinearTiling | None:
    """Return the tiling for ``[M, K] @ [N, K].T``, or None if cuBLAS is as fast or no tiling fits."""
    # In short: one program on a multiprocessor, which loads as many bytes at a time as it holds; no sum over programs.
    # With more rows than a tile, that is so as long as no multiprocessor gets a second program. From there on tensor
    # cores are the limit, and cuBLAS uses them better.
    if m == 1 or (m == 2 and n <= MAX_OUTPUTS_OF_TWO * processors):
        return _without_tensor_cores(m, n, k, processors)
    if not 2 <= m <= MAX_ROWS or n % 16 or k % BLOCK or n < LEAST_OUTPUTS * processors:
        return None
    if m > TILE_ROWS:
        return _of_several_row_tiles(m, n, processors)
    rows, outputs = max(16, power_of_two(m)), TILE
    while rows == TILE_ROWS and outputs > 16 and n / (outputs * processors) < FEWEST_FULL_TILES:
        outputs //= 2
    tiles = min(MAX_TILES, -(-n // (outputs * processors)))
    inputs = BLOCK if stages_that_fit(rows, outputs * tiles, 2 * BLOCK) < FEWEST_STAGES else 2 * BLOCK
    return LinearTiling(rows, outputs, tiles, inputs, stages_that_fit(rows, outputs * tiles, inputs), prefetched=0)


def _of_several_row_tiles(m: int, n: int, processors: int) -> LinearTiling | None:
    """Return the smallest tile of outputs of which each multiprocessor gets one at most, if there is such."""
    row_tiles = -(-m // TILE_ROWS)
    if m < FULL_TILES * row_tiles * TILE_ROWS:
        return None
    for outputs in (TILE, 2 * TILE):
        programs = row_tiles * -(-n // outputs)
        if BUSY * processors <= programs <= processors:
            stages = stages_that_fit(TILE_ROWS, outputs, BLOCK)
            return LinearTiling(TILE_ROWS, outputs, 1, BLOCK, stages, prefetched=0)
    return None


def stages_that_fit(rows: int, outputs: int, inputs: int) -> int:
    """Return how many blocks of rows and weights a multiprocessor holds."""
    return SHARED_MEMORY // ((rows + outputs) * inputs * 2)


def _without_tensor_cores(m: int, n: int, k: int, processors: int) -> LinearTiling | None:
    """Return the tiling of a kernel whose programs hold all their weights before they wait, if registers suffice."""
    if k % 16:
        return None
    outputs = MANY_OUTPUTS if n >= LEAST_FOR_MANY * processors else FEW_OUTPUTS
    blocks = -(-k // WIDE_BLOCK)
    if blocks * outputs * WIDE_BLOCK <= PREFETCHED_WEIGHTS:
        return LinearTiling(m, outputs, 1, WIDE_BLOCK, stages=1, prefetched=blocks)
    return LinearTiling(m, outputs, 1, 2 * WIDE_BLOCK, stages=1, prefetched=1)


def choose_normed_tiling(n: int, k: int, processors: int = 132) -> LinearTiling | None:
    """Return the tiling of a matmul of one row that each program norms, None if too many would do so."""
    tiling = choose_linear_tiling(1, n, k, processors)
    if tiling is None or tiling.prefetched * tiling.inputs < k:
        return None
    twice = tiling._replace(outputs=2 * tiling.outputs)
    fits = 2 * twice.outputs * tiling.prefetched * tiling.inputs <= PREFETCHED_WEIGHTS  # beside the row itself
    if fits and n > FEW_NORMING * tiling.outputs * processors:
        tiling = twice
    return tiling if n <= MAX_NORMING * tiling.outputs * processors else None
