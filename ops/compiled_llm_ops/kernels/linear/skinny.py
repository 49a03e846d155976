"""Triton kernels for matmuls of up to some hundred rows with a weight, which read it near the bandwidth of memory."""

# Both may begin while the previous kernel ends (see ``pdl``): by then their first weights are being loaded.
# Shapes: M rows, N outputs, K inputs.

# Kernels are Triton's objects, not the functions that a type checker sees.
# mypy: disable-error-code="assignment, var-annotated"
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from compiled_llm_ops.kernels.linear.norm import silu
from compiled_llm_ops.kernels.linear.skinny_tiling import LinearTiling


@triton.jit
def after_waiting(value):
    """Return ``value`` once the previous kernel has ended, and trigger the next one."""
    # A load whose address depends on the result cannot be moved above the wait. Waiting and triggering again, with each
    # block, has no effect.
    return tl.inline_asm_elementwise(
        "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.b32 $0, $1;",
        "=r,r",
        [value],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit(do_not_specialize=["M"])  # Triton would compile again for 1 and for multiples of 16
def _linear_tensor_cores(
    x,
    w,
    y,
    M,
    N,
    K,
    ROWS: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute TILES times BN outputs of ROWS rows over all of K; the descriptors ``x`` and ``w`` read zeros outside."""
    # Axes of the grid: tiles of rows, which read the same weights at about the same time, and tiles of outputs.
    # Tensor cores take 64 rows of their first operand at a time, and as few as 8 columns of the second.
    SWAPPED: tl.constexpr = ROWS < 64
    first_row, tile = tl.program_id(0) * ROWS, tl.program_id(1) * TILES
    sums = ()
    for _ in tl.static_range(TILES):
        sums += (tl.zeros([BN, ROWS] if SWAPPED else [ROWS, BN], tl.float32),)
    for k in tl.range(0, K, BK, num_stages=STAGES):
        # Triton puts loads that follow each other directly behind one barrier: one wait for all tiles.
        weights = ()
        for i in tl.static_range(TILES):
            weights += (w.load([(tile + i) * BN, k]),)
        rows = x.load([first_row, after_waiting(k) if PDL else k])
        added = ()
        for i in tl.static_range(TILES):
            if SWAPPED:
                added += (tl.dot(weights[i], rows.T, sums[i]),)
            else:
                added += (tl.dot(rows, weights[i].T, sums[i]),)
        sums = added
    offs_m = first_row + tl.arange(0, ROWS)[:, None]
    for i in tl.static_range(TILES):
        offs_n = (tile + i) * BN + tl.arange(0, BN)[None, :]
        total = sums[i].T if SWAPPED else sums[i]
        tl.store(y + offs_m * N + offs_n, total.to(y.dtype.element_ty), mask=(offs_m < M) & (offs_n < N))


@triton.jit
def _load_block(at, offs_k, k, K, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(at, mask=k + offs_k < K, other=0.0)
    return tl.load(at)


@triton.jit
def _normed_row(x, update, factors, total, offs_k, K, epsilon, BK: tl.constexpr, PREFETCHED: tl.constexpr,
                MASKED: tl.constexpr):  # fmt: skip
    """Return all of ``x + update``, normed and multiplied with ``factors``, in blocks; one program stores the sum."""
    blocks = ()
    squares = tl.zeros([BK], tl.float32)
    for block in tl.static_range(PREFETCHED):
        first = _load_block(x + block * BK + offs_k, offs_k, block * BK, K, MASKED).to(tl.float32)
        sums = (first + _load_block(update + block * BK + offs_k, offs_k, block * BK, K, MASKED)).to(x.dtype.element_ty)
        if tl.program_id(0) == 0:
            tl.store(total + block * BK + offs_k, sums, mask=block * BK + offs_k < K)
        values = sums.to(tl.float32)
        squares += values * values
        blocks += (values,)
    factor = tl.rsqrt(tl.sum(squares, 0) / K + epsilon)
    normed = ()
    for block in tl.static_range(PREFETCHED):
        values = (blocks[block] * factor).to(x.dtype.element_ty).to(tl.float32)
        normed += ((values * factors[block].to(tl.float32)).to(x.dtype.element_ty).to(tl.float32),)
    return normed


@triton.jit
def _skinny_linear_one_or_two_rows(
    x,
    update,
    norm,
    total,
    w,
    y,
    N,
    K,
    epsilon,
    ROWS: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PREFETCHED: tl.constexpr,
    MASKED: tl.constexpr,
    GATED: tl.constexpr,
    TRIGGER_FIRST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute BN outputs of each row over all of K, weights straight to registers, PREFETCHED blocks before waiting."""
    # With a ``norm``, the one row is ``x + update``, which each program norms for itself; PREFETCHED blocks are then
    # all of K. If GATED, the weight has 2 N rows: the first N outputs go through SiLU and are multiplied with the
    # others.
    PARTS: tl.constexpr = 2 if GATED else 1
    offs_n, offs_k = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)
    w_block = w + tl.minimum(offs_n, N - 1).to(tl.int64)[:, None] * K + offs_k[None, :]
    part_size = N.to(tl.int64) * K
    prefetched = ()
    factors = ()
    for block in tl.static_range(PREFETCHED):
        for part in tl.static_range(PARTS):
            at = w_block + part * part_size + block * BK
            prefetched += (_load_block(at, offs_k[None, :], block * BK, K, MASKED),)
        if norm is not None:
            factors += (_load_block(norm + block * BK + offs_k, offs_k, block * BK, K, MASKED),)
    if PDL:
        if TRIGGER_FIRST:
            gdc_launch_dependents()
        gdc_wait()
        if not TRIGGER_FIRST:
            gdc_launch_dependents()
    normed = ()
    if norm is not None:
        normed = _normed_row(x, update, factors, total, offs_k, K, epsilon, BK, PREFETCHED, MASKED)
    sums = ()
    for _ in tl.static_range(ROWS * PARTS):
        sums += (tl.zeros([BN, BK], tl.float32),)
    for block in tl.static_range(PREFETCHED):
        added = ()
        for row in tl.static_range(ROWS):
            if norm is not None:
                values = normed[block]
            else:
                at = x + row * K + block * BK + offs_k
                values = _load_block(at, offs_k, block * BK, K, MASKED).to(tl.float32)
            for part in tl.static_range(PARTS):
                weights = prefetched[block * PARTS + part].to(tl.float32)
                added += (sums[row * PARTS + part] + weights * values[None, :],)
        sums = added
    for k in tl.range(PREFETCHED * BK, K, BK, num_stages=1):
        added = ()
        for row in tl.static_range(ROWS):
            values = _load_block(x + row * K + k + offs_k, offs_k, k, K, MASKED).to(tl.float32)
            for part in tl.static_range(PARTS):
                weights = _load_block(w_block + part * part_size + k, offs_k[None, :], k, K, MASKED).to(tl.float32)
                added += (sums[row * PARTS + part] + weights * values[None, :],)
        sums = added
    for row in tl.static_range(ROWS):
        outputs = tl.sum(sums[row * PARTS], 1).to(y.dtype.element_ty)
        if GATED:
            gate = silu(outputs.to(tl.float32)).to(y.dtype.element_ty).to(tl.float32)
            other = tl.sum(sums[row * PARTS + 1], 1).to(y.dtype.element_ty).to(tl.float32)
            outputs = (gate * other).to(y.dtype.element_ty)
        tl.store(y + row * N + offs_n, outputs, mask=offs_n < N)


class Normed(NamedTuple):
    """The way a row is normed before the product: ``update`` is added, and the sum is normed."""

    update: Tensor  # ``[1, K]``
    weight: Tensor  # ``[K]``, multiplied with the normed sum
    epsilon: float
    total: Tensor  # ``[1, K]``, written: the sum


def multiply_few(
    rows: Tensor,
    weight: Tensor,
    tiling: LinearTiling,
    *,
    normed: Normed | None = None,
    gated: bool = False,
    trigger_first: bool = False,
    pdl: bool,
) -> Tensor:
    """Return ``rows @ weight.T`` of one or two rows; ``silu(first) * second`` of the outputs' halves if gated."""
    # Both are contiguous, in float16 or bfloat16. If rows are normed, all of K is prefetched. ``trigger_first`` lets
    # the next kernel begin before this one has waited for the previous.
    (m, k), n = rows.shape, weight.shape[0] // (2 if gated else 1)
    outputs = tiling.outputs // (2 if gated else 1)
    update, norm, epsilon, total = normed or (None, None, 0.0, None)
    y = rows.new_empty(m, n)
    _skinny_linear_one_or_two_rows[(-(-n // outputs),)](
        rows, update, norm, total, weight, y, n, k, epsilon,
        ROWS=m, BN=outputs, BK=tiling.inputs, PREFETCHED=tiling.prefetched, MASKED=k % tiling.inputs > 0, GATED=gated,
        TRIGGER_FIRST=trigger_first, **_options(pdl),
    )  # fmt: skip
    return y


def _options(pdl: bool) -> dict[str, Any]:
    return {"PDL": pdl, "num_warps": 4, **({"launch_pdl": True} if pdl else {})}


def multiply(rows: Tensor, weight: Tensor, tiling: LinearTiling, *, trigger_first: bool = False, pdl: bool) -> Tensor:
    """Return ``rows @ weight.T``; ``trigger_first`` is as of ``multiply_few``, and has no effect with tensor cores."""
    # Both are contiguous, in float16 or bfloat16; the weight begins at a multiple of 16 bytes.
    if tiling.rows <= 2:
        return multiply_few(rows, weight, tiling, trigger_first=trigger_first, pdl=pdl)
    (m, k), n = rows.shape, weight.shape[0]
    y = rows.new_empty(m, n)
    blocks_of_rows = TensorDescriptor.from_tensor(rows, [tiling.rows, tiling.inputs])
    blocks_of_weight = TensorDescriptor.from_tensor(weight, [tiling.outputs, tiling.inputs])
    _linear_tensor_cores[(-(-m // tiling.rows), -(-n // (tiling.outputs * tiling.tiles)))](
        blocks_of_rows, blocks_of_weight, y, m, n, k,
        ROWS=tiling.rows, BN=tiling.outputs, BK=tiling.inputs, TILES=tiling.tiles, STAGES=tiling.stages,
        **_options(pdl),
    )  # fmt: skip
    return y
