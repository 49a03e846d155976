"""Rows are rounded to e4m3, and multiplied with a weight in e4m3 by blocks on tensor cores of 8 bits."""

# Where a library's formula rounds activations, rows and weights come into shared memory as they lie, and no number is
# made of a code. Sums of 128 inputs are scaled in float32, as in the formula, and the next ones begin at zero: tensor
# cores keep fewer bits of sums of 8 bits. From 64 rows on rows are the first operand, of which a thread has two in 64:
# it needs their scales alone. With the weight first it has those of a quarter of all rows to read and multiply with.
# Shapes: M rows, N outputs, K inputs.

# Kernels are Triton's objects, not the functions that a type checker sees.
# mypy: disable-error-code="assignment, var-annotated"
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from compiled_llm_ops.kernels.linear.skinny import after_waiting
from compiled_llm_ops.packed.formats import TILE_INPUTS, PackedWeight
from compiled_llm_ops.packed.kernels.tiles import finish_tile, options, parts_of
from compiled_llm_ops.packed.tilings import RoundedTiling

_LARGEST: tl.constexpr = tl.constexpr(448.0)  # in e4m3


@triton.jit(do_not_specialize=["M"])
def _round(x, rounded, scales, M, K, padded, ROWS: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr):
    """Round rows by BK inputs, and write their scales ``[K / BK, padded]``; rows that are padding become zeros."""
    tile, group = tl.program_id(0), tl.program_id(1)
    m = (after_waiting(tile) if PDL else tile) * ROWS + tl.arange(0, ROWS)
    k = group * BK + tl.arange(0, BK)
    values = tl.load(x + m[:, None] * K + k[None, :], mask=(m < M)[:, None], other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values), 1), 1e-12) / _LARGEST
    tl.store(rounded + m[:, None] * K + k[None, :], (values / scale[:, None]).to(rounded.dtype.element_ty))
    tl.store(scales + group * padded + m, scale)


def round_rows(rows: Tensor, multiple: int = 8, *, pdl: bool) -> tuple[Tensor, Tensor]:
    """Return rows ``[M, K]`` in e4m3, and their scales by 128 inputs, the rows first.

    ``multiple``, itself one of 8: the number of rows is padded to a multiple of it.
    """
    (m, k), size = rows.shape, 8
    padded = -(-m // multiple) * multiple
    rounded = rows.new_empty(padded, k, dtype=torch.float8_e4m3fn)
    scales = rows.new_empty(k // TILE_INPUTS, padded, dtype=torch.float32)
    _round[(padded // size, k // TILE_INPUTS)](
        rows, rounded, scales, m, k, padded, ROWS=size, BK=TILE_INPUTS, PDL=pdl, **options(4, pdl)
    )
    return rounded, scales.t()


@triton.jit(do_not_specialize=["M", "splits"])  # Triton would compile again for 1 and for multiples of 16
def _packed_rounded(
    x, x_scales, codes, scales, bias, y, parts, counters, M, N, K, padded, scales_n, splits,
    ROWS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute BN outputs of ROWS rows over a part of the inputs; the last program of a tile sums all parts.

    Rows are padded to whole tiles; BK inputs of a row share a scale, ``[K / BK, padded]``, and BK x BK of the weight.
    """
    tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    first_row, first, part = tl.program_id(0) * ROWS, tl.program_id(1) * BN, tl.program_id(2)
    ROWS_FIRST: tl.constexpr = ROWS >= 64
    steps = tl.cdiv(K, BK)
    each = tl.cdiv(steps, splits)
    begin = part * each
    end = tl.minimum(begin + each, steps)
    offs_m = first_row + tl.arange(0, ROWS)
    place = scales + first // BK * scales_n
    sums = tl.zeros([ROWS, BN] if ROWS_FIRST else [BN, ROWS], tl.float32)
    for step in tl.range(begin, end, num_stages=STAGES):
        weights = codes.load([first, step * BK])
        scale = tl.load(place + step)
        written = after_waiting(step) if PDL else step
        rows = x.load([first_row, written * BK])
        row_scales = tl.load(x_scales + written * padded + offs_m)
        if ROWS_FIRST:
            sums += tl.dot(rows, weights.T) * (scale * row_scales)[:, None]
        else:
            sums += tl.dot(weights, rows.T) * (scale * row_scales)[None, :]
    if ROWS_FIRST:
        sums = sums.T
    offs_n = first + tl.arange(0, BN)
    finish_tile(y, bias, sums, parts, counters, tile, part, offs_n, offs_m, M, N, splits, ROWS, BN, SPLIT, PDL)


def multiply(rows: Tensor, weight: PackedWeight, bias: Tensor | None, tiling: RoundedTiling, *, pdl: bool) -> Tensor:
    """Return ``rows @ weight.T + bias`` for rows that are rounded; ``can_be_rounded`` says with which weights."""
    _, codes, scales, _, (n, k), _ = weight
    m, y = rows.shape[0], rows.new_empty(rows.shape[0], n)
    rounded, row_scales = round_rows(rows, tiling.rows, pdl=pdl)
    tiles = len(rounded) // tiling.rows, -(-n // tiling.outputs)
    parts, counters = parts_of(tiles[0] * tiles[1], tiling, rows.device)
    grid = (*tiles, tiling.splits)
    _packed_rounded[grid](
        TensorDescriptor.from_tensor(rounded, [tiling.rows, TILE_INPUTS]), row_scales,
        TensorDescriptor.from_tensor(codes, [tiling.outputs, TILE_INPUTS]), scales, bias, y, parts, counters,
        m, n, k, len(rounded), scales.stride(0), tiling.splits,
        ROWS=tiling.rows, BN=tiling.outputs, BK=TILE_INPUTS, STAGES=tiling.stages, SPLIT=tiling.splits > 1, PDL=pdl,
        **options(tiling.warps, pdl),
    )  # fmt: skip
    return y
