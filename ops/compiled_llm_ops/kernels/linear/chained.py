"""Triton kernels for two matmuls of up to 256 rows with the residual sum and its norm between them, in two launches."""

# The norm needs no launch of its own, and no program norms a row: the first matmul multiplies its sums with the norm's
# weight and leaves their squares, and the second one multiplies its outputs with the root that these give. Numbers are
# rounded once less than in HuggingFace's models, where the normed row is rounded before its weight is multiplied.
# Both may begin while the previous kernel ends (see ``pdl``): by then their first weights are being loaded.
# Shapes: M rows, N outputs, K inputs, T tiles of the first matmul's outputs.

# Kernels are Triton's objects, not the functions that a type checker sees.
# mypy: disable-error-code="assignment, var-annotated"
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from compiled_llm_ops.kernels.linear.chained_tiling import WARPS, ChainedTiling
from compiled_llm_ops.kernels.linear.norm import silu
from compiled_llm_ops.kernels.linear.skinny import after_waiting

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # whether kernels run without a GPU, where PTX does not

LARGEST_TOGETHER = tl.constexpr(8)
"""Rows of a tile up to which a program has registers for all of their inputs at once."""


@triton.jit
def _together(blocks):
    """Return up to three blocks of 16 bits a number, once all of them are there."""
    # Triton lays a block out for the tensor cores as soon as it has come, in memory that it then uses for the next one,
    # and loads that one no earlier: the program waited for L2 again with each block.
    BLOCKS: tl.constexpr = len(blocks)
    if INTERPRETED or BLOCKS == 1:
        return blocks
    elif BLOCKS == 2:  # noqa: RET505  the kernel has one branch, known when it is compiled
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $2; mov.b32 $1, $3;",
            "=&r,=&r,r,r",
            [blocks[0], blocks[1]],
            dtype=(blocks[0].dtype, blocks[0].dtype),
            is_pure=False,  # a pure one is moved behind the conversions
            pack=2,
        )
    else:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $3; mov.b32 $1, $4; mov.b32 $2, $5;",
            "=&r,=&r,=&r,r,r,r",
            [blocks[0], blocks[1], blocks[2]],
            dtype=(blocks[0].dtype, blocks[0].dtype, blocks[0].dtype),
            is_pure=False,
            pack=2,
        )


@triton.jit
def _store_sums(
    sums, states, norm, total, scaled, squares, first_row, first_output, M, N,
    ROWS: tl.constexpr, BN: tl.constexpr, SWAPPED: tl.constexpr,
):  # fmt: skip
    """Add ``states`` to a tile of the first product, ``[BN, ROWS]`` if SWAPPED, and store what its norm needs."""
    # ``squares`` points to those of the tile's outputs.
    rows, outputs = first_row + tl.arange(0, ROWS), first_output + tl.arange(0, BN)
    offs_m, offs_n = (rows[None, :], outputs[:, None]) if SWAPPED else (rows[:, None], outputs[None, :])
    at, mask = offs_m * N + offs_n, offs_m < M
    dtype = total.dtype.element_ty
    residual = tl.load(states + at, mask=mask, other=0.0).to(tl.float32)
    factors = tl.load(norm + offs_n).to(tl.float32)
    added = (residual + sums.to(dtype).to(tl.float32)).to(dtype)
    tl.store(total + at, added, mask=mask)
    values = added.to(tl.float32)
    tl.store(scaled + at, (values * factors).to(dtype), mask=mask)
    tl.store(squares + rows, tl.sum(values * values, 0 if SWAPPED else 1))


@triton.jit(do_not_specialize=["M"])  # Triton would compile again for 1 and for multiples of 16
def _linear_add(
    x,
    w,
    states,
    norm,
    total,
    scaled,
    squares,
    M,
    N,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute BN outputs of all rows over all of K and add ``states``; each program asks for its weights at once."""
    # SPLIT warps have a part of each block of BK inputs each: alone, one of them has too little to multiply.
    BLOCKS: tl.constexpr = K // BK
    tile = tl.program_id(0)
    offs_n = tile * BN + tl.arange(0, BN)
    inputs = (tl.arange(0, SPLIT) * (BK // SPLIT))[:, None, None] + tl.arange(0, BK // SPLIT)[None, None, :]
    weights = ()
    for block in tl.static_range(BLOCKS):
        weights += (tl.load(w + offs_n.to(tl.int64)[None, :, None] * K + block * BK + inputs),)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    offs_m = tl.arange(0, ROWS)
    rows = ()
    for block in tl.static_range(BLOCKS):
        at = x + offs_m[None, :, None] * K + block * BK + inputs
        rows += (tl.load(at, mask=offs_m[None, :, None] < M, other=0.0),)
    if ROWS <= LARGEST_TOGETHER:
        rows = _together(rows)
    sums = tl.zeros([SPLIT, BN, ROWS], tl.float32)
    for block in tl.static_range(BLOCKS):
        sums = tl.dot(weights[block], tl.permute(rows[block], (0, 2, 1)), sums)
    squares += tile * ROWS
    _store_sums(tl.sum(sums, 0), states, norm, total, scaled, squares, 0, tile * BN, M, N, ROWS, BN, SWAPPED=True)


@triton.jit(do_not_specialize=["M"])
def _linear_add_tiles(
    x,
    w,
    states,
    norm,
    total,
    scaled,
    squares,
    squares_stride,
    M,
    N,
    K,
    ROWS: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """As ``_linear_add``, for tiles of more rows; the descriptors ``x`` and ``w`` read zeros outside."""
    # Axes of the grid: tiles of rows, which read the same weights at about the same time, and tiles of outputs.
    SWAPPED: tl.constexpr = ROWS < 64  # as in `_linear_tensor_cores`
    first_row, tile = tl.program_id(0) * ROWS, tl.program_id(1)
    sums = tl.zeros([BN, ROWS] if SWAPPED else [ROWS, BN], tl.float32)
    for k in tl.range(0, K, BK, num_stages=STAGES):
        weights = w.load([tile * BN, k])
        rows = x.load([first_row, after_waiting(k) if PDL else k])
        sums = tl.dot(weights, rows.T, sums) if SWAPPED else tl.dot(rows, weights.T, sums)
    if PDL:
        gdc_wait()  # the loop has waited; this one keeps the compiler from reading `states` before that
    squares += tile * squares_stride
    _store_sums(sums, states, norm, total, scaled, squares, first_row, tile * BN, M, N, ROWS, BN, SWAPPED)


@triton.jit(do_not_specialize=["M"])
def _linear_of_scaled(
    scaled,
    w,
    squares,
    squares_stride,
    y,
    M,
    N,
    K,
    epsilon,
    ROWS: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TILES: tl.constexpr,
    PARTS: tl.constexpr,
    GATED: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute BN outputs of ROWS rows over all of K, and divide them by the rows' root mean squares."""
    # ``squares`` ``[TILES, M']`` has parts of their sums; PARTS is a power of two from TILES on. If GATED, the weight
    # has 2 N rows: the first N outputs go through SiLU and are multiplied with the others. Axes of the grid as above.
    SWAPPED: tl.constexpr = ROWS < 64
    first_row, tile = tl.program_id(0) * ROWS, tl.program_id(1)
    sums = tl.zeros([BN, ROWS] if SWAPPED else [ROWS, BN], tl.float32)
    others = sums
    for k in tl.range(0, K, BK, num_stages=STAGES):
        # Triton puts loads that follow each other directly behind one barrier.
        weights = w.load([tile * BN, k])
        more_weights = w.load([N + tile * BN, k]) if GATED else weights
        rows = scaled.load([first_row, after_waiting(k) if PDL else k])
        sums = tl.dot(weights, rows.T, sums) if SWAPPED else tl.dot(rows, weights.T, sums)
        if GATED:
            others = tl.dot(more_weights, rows.T, others) if SWAPPED else tl.dot(rows, more_weights.T, others)
    own_rows, own_outputs, parts = first_row + tl.arange(0, ROWS), tile * BN + tl.arange(0, BN), tl.arange(0, PARTS)
    # A multiple of 4, though it is zero: loads keep their layout, and so sums their order, with PDL and without.
    at = squares + (4 * after_waiting(0) if PDL else 0) + parts[:, None] * squares_stride + own_rows[None, :]
    total = tl.sum(tl.load(at, mask=(parts < TILES)[:, None], other=0.0), 0)
    roots = tl.rsqrt(total / K + epsilon)
    roots = roots[None, :] if SWAPPED else roots[:, None]
    dtype = y.dtype.element_ty
    outputs = (sums * roots).to(dtype)
    if GATED:
        gate = silu(outputs.to(tl.float32)).to(dtype).to(tl.float32)
        outputs = (gate * (others * roots).to(dtype).to(tl.float32)).to(dtype)
    if SWAPPED:
        offs_m, offs_n = own_rows[None, :], own_outputs[:, None]
    else:
        offs_m, offs_n = own_rows[:, None], own_outputs[None, :]
    tl.store(y + offs_m * N + offs_n, outputs, mask=(offs_m < M) & (offs_n < N))


class ScaledSum(NamedTuple):
    """A residual sum, and what its norm needs."""

    total: Tensor  # ``[M, N]``, the sum
    scaled: Tensor  # ``[M, N]``, multiplied with the norm's weight
    # ``[T, M']`` float32, for each row the sum of the squares of one tile's outputs; M' are whole tiles
    squares: Tensor


def multiply_and_add(
    rows: Tensor, weight: Tensor, states: Tensor, norm: Tensor, tiling: ChainedTiling, *, pdl: bool
) -> ScaledSum:
    """Return ``states + rows @ weight.T`` and what its norm needs."""
    # All is contiguous and bfloat16: rows ``[M, K]``, weight ``[N, K]``, states ``[M, N]``, the norm's weight ``[N]``.
    (m, k), n, tile = rows.shape, weight.shape[0], tiling.first
    grid = (-(-m // tile.rows), n // tile.outputs)
    total, scaled = rows.new_empty(m, n), rows.new_empty(m, n)
    whole_tiles = max(tile.rows, tiling.second.rows)
    squares = rows.new_empty(grid[1], -(-m // whole_tiles) * whole_tiles, dtype=torch.float32)
    results = (states, norm, total, scaled, squares)
    constants = {"ROWS": tile.rows, "BN": tile.outputs, "BK": tile.inputs, **_options(pdl)}
    if tile.stages == 0:
        _linear_add[grid[1:]](rows, weight, *results, m, n, K=k, SPLIT=WARPS, **constants)
    else:
        blocks = (
            TensorDescriptor.from_tensor(rows, [tile.rows, tile.inputs]),
            TensorDescriptor.from_tensor(weight, [tile.outputs, tile.inputs]),
        )
        _linear_add_tiles[grid](*blocks, *results, squares.stride(0), m, n, k, STAGES=tile.stages, **constants)
    return ScaledSum(total, scaled, squares)


def multiply_scaled(
    given: ScaledSum, weight: Tensor, epsilon: float, tiling: ChainedTiling, *, gated: bool, pdl: bool
) -> Tensor:
    """Return the normed sum times ``weight.T``, which begins at a multiple of 16 bytes; gated as ``multiply_few``."""
    (m, k), n, tiles = given.scaled.shape, weight.shape[0] // (2 if gated else 1), len(given.squares)
    tile = tiling.second
    y = given.scaled.new_empty(m, n)
    blocks_of_rows = TensorDescriptor.from_tensor(given.scaled, [tile.rows, tile.inputs])
    blocks_of_weight = TensorDescriptor.from_tensor(weight, [tile.outputs, tile.inputs])
    _linear_of_scaled[(-(-m // tile.rows), -(-n // tile.outputs))](
        blocks_of_rows, blocks_of_weight, given.squares, given.squares.stride(0), y, m, n, k, epsilon,
        ROWS=tile.rows, BN=tile.outputs, BK=tile.inputs, TILES=tiles, PARTS=triton.next_power_of_2(tiles), GATED=gated,
        STAGES=tile.stages, **_options(pdl),
    )  # fmt: skip
    return y


def _options(pdl: bool) -> dict[str, Any]:
    return {"PDL": pdl, "num_warps": WARPS, **({"launch_pdl": True} if pdl else {})}
