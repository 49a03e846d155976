"""How two matmuls with a norm between them are cut up, or that they are faster one by one."""

# Up to 16 rows, fitted to a layer of Qwen3-0.6B's decode step on an H100, its kernels one after the other, before they
# were ops: of 2, 4, 8 and 16 rows, a layer takes 0.96, 0.81, 0.87 and 0.90 of the time that it takes with separate
# kernels. With more rows, fitted there to both pairs of matmuls of a layer without attention: of 32, 48, 64, 96, 128,
# 192 and 256 rows, they take 0.90, 0.90, 0.92, 0.79, 0.85, 0.93 and 0.93 of the time. With the matmuls of an 8B model
# nothing is gained: there weights take longest. On an H200, a layer of 8 rows takes 0.95 of the time with tiles of 8
# rows that it takes with tiles of 16. ``tools/fit_tilings.py --only chained`` measures both matmuls without their
# layer, on any GPU. There less is gained: on an H200, 16 rows take 0.97 to 1.00 of the time of separate kernels, and 2
# rows 1.07 to 1.16 of it.
# Shapes: M rows, N outputs, K inputs.

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from compiled_llm_ops.kernels.linear.skinny_tiling import processors_of

HELD_INPUTS, HELD_BLOCK = 3072, 1024
"""Inputs of the first matmul whose weights a program asks for at once, 96 KB in registers, in blocks of so many."""

FIRST_OUTPUTS, OUTPUTS = 16, 64
"""Outputs for each multiprocessor of either matmul, up to which all of its programs run at a time with few rows."""

WARPS = 4


class MatmulTile(NamedTuple):
    """The part of a matmul that one program computes."""

    rows: int  # of the input
    outputs: int  # as many of both halves if the product is gated
    inputs: int  # at a time
    stages: int  # blocks of inputs on their way at a time; 0 if a program asks for all its weights at once


class ChainedTiling(NamedTuple):
    """One way to cut up two matmuls, each over all inputs."""

    first: MatmulTile
    second: MatmulTile


class _Fitted(NamedTuple):
    """Tiles for up to so many rows."""

    most_rows: int
    first: MatmulTile
    gated: MatmulTile
    plain: MatmulTile


_FITTED = (
    _Fitted(8, MatmulTile(8, 16, HELD_BLOCK, 0), MatmulTile(8, 64, 128, 5), MatmulTile(8, 64, 256, 5)),
    _Fitted(16, MatmulTile(16, 16, HELD_BLOCK, 0), MatmulTile(16, 64, 128, 5), MatmulTile(16, 64, 256, 5)),
    _Fitted(64, MatmulTile(16, 64, 256, 5), MatmulTile(32, 64, 128, 4), MatmulTile(32, 64, 256, 4)),
    _Fitted(128, MatmulTile(32, 64, 256, 4), MatmulTile(64, 64, 128, 4), MatmulTile(64, 64, 128, 6)),
    _Fitted(256, MatmulTile(64, 32, 256, 4), MatmulTile(64, 32, 64, 4), MatmulTile(64, 128, 128, 4)),
)

MAX_ROWS = _FITTED[-1].most_rows


def chained_tiling_for(rows: int, weight: Tensor, next_weight: Tensor, gated: bool) -> ChainedTiling | None:
    """Return how our kernels cut up the matmuls of so many rows, None if they are faster one by one."""
    processors = processors_of(weight.device)
    if not processors or weight.dtype != torch.bfloat16:  # the scaled sum could leave the range of float16
        return None
    (n, k), next_n = weight.shape, next_weight.shape[0] // (2 if gated else 1)
    return choose_chained_tiling(rows, n, k, next_n, gated, processors)


def choose_chained_tiling(
    m: int, n: int, k: int, next_n: int, gated: bool, processors: int = 132
) -> ChainedTiling | None:
    """Return the tiling for ``[M, K] @ [N, K].T`` and for the product with ``[next_n, N]``; None if it does not pay."""
    if not 2 <= m <= MAX_ROWS or k % HELD_BLOCK or k > HELD_INPUTS or n > FIRST_OUTPUTS * processors:
        return None
    # The first conditions are those of weights in registers; more rows were measured with no other weights.
    fitted = next(tiles for tiles in _FITTED if m <= tiles.most_rows)
    first, second = fitted.first, fitted.gated if gated else fitted.plain
    if n % 128 or n % second.inputs or next_n % second.outputs or next_n > OUTPUTS * processors:
        return None
    return ChainedTiling(first, second)
