"""How two matmuls with a norm between them are cut up, or that they are faster one by one.

Fitted to a layer of Qwen3-0.6B's decode step on an H100, its kernels one after the other, before they were ops: of 2,
4, 8 and 16 rows, a layer takes 0.96, 0.81, 0.87 and 0.90 of the time that it takes with separate kernels. From 32 rows
on nothing is gained, and with the matmuls of an 8B model nothing either: there weights take longest.
``tools/fit_tilings.py --only chained`` measures both matmuls without their layer, on any GPU. There less is gained: on
an H200, 16 rows take 0.97 to 1.00 of the time of separate kernels, and 2 rows 1.07 to 1.16 of it.

Shapes: M rows, N outputs, K inputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from compiled_llm_ops.kernels.linear.skinny_tiling import TILE, processors_of, stages_that_fit

ROWS = 16
"""Rows of the only tile, the most that are multiplied."""

FIRST_OUTPUTS, FIRST_INPUTS = 16, 1024
"""Outputs of a program of the first matmul, and inputs that it multiplies at a time."""

HELD_INPUTS = 3072
"""Inputs of the first matmul whose weights a program asks for at once: 96 KB, in registers."""

WARPS = 4

MOST_STAGES = 5
"""Stages from which on more gained nothing."""


class ChainedTiling(NamedTuple):
    """One way to cut up two matmuls, each over all inputs.

    Attributes:
        first_outputs: outputs of a program of the first one.
        first_inputs: its inputs at a time.
        outputs: outputs of a program of the second one; if it is gated, as many of both halves.
        inputs: its inputs at a time.
        stages: its blocks of inputs on their way at a time.
        warps: of a program of either.
    """

    first_outputs: int
    first_inputs: int
    outputs: int
    inputs: int
    stages: int
    warps: int


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
    if not 2 <= m <= ROWS or k % FIRST_INPUTS or k > HELD_INPUTS or n % (2 * TILE):
        return None
    if n > FIRST_OUTPUTS * processors or next_n % TILE or next_n > TILE * processors:
        return None
    inputs = 2 * TILE if gated else 4 * TILE
    if n % inputs:
        return None
    stages = min(MOST_STAGES, stages_that_fit(ROWS, TILE * (2 if gated else 1), inputs))
    return ChainedTiling(FIRST_OUTPUTS, FIRST_INPUTS, TILE, inputs, stages, WARPS)
