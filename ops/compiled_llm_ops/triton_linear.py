"""Triton kernels for products of few rows with a weight, which read the weight near the bandwidth of memory.

Both may begin while the kernel in front of them ends (see ``overlap``), and have weights on their way by then.

Shapes: M rows, N outputs, K inputs.
"""

# Kernels are Triton's objects, not the functions that a type checker sees.
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from compiled_llm_ops.tiling import Tiling


@triton.jit
def _after_waiting(value):
    """Return ``value`` once the kernel in front has ended, and let the next one go.

    A read at an address made of it cannot come earlier. To do both again, with each block, is of no effect.
    """
    return tl.inline_asm_elementwise(
        "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.b32 $0, $1;",
        "=r,r",
        [value],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit(do_not_specialize=["M"])  # 1 and multiples of 16 would be compiled again
def _skinny_linear_tensor_cores(
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
    """TILES times BN outputs of all rows over all of K; ``x`` and ``w`` describe tensors, and read zeros outside."""
    # Tensor cores take 64 rows of their first operand at a time, and as few as 8 columns of the second.
    SWAPPED: tl.constexpr = ROWS < 64
    tile = tl.program_id(0) * TILES
    sums = ()
    for _ in tl.static_range(TILES):
        sums += (tl.zeros([BN, ROWS] if SWAPPED else [ROWS, BN], tl.float32),)  # type: ignore[assignment]
    for k in tl.range(0, K, BK, num_stages=STAGES):
        # Loads that stand together wait at one barrier.
        weights = ()
        for i in tl.static_range(TILES):
            weights += (w.load([(tile + i) * BN, k]),)  # type: ignore[assignment]
        rows = x.load([0, _after_waiting(k) if PDL else k])
        added = ()
        for i in tl.static_range(TILES):
            if SWAPPED:
                added += (tl.dot(weights[i], rows.T, sums[i]),)  # type: ignore[assignment]
            else:
                added += (tl.dot(rows, weights[i].T, sums[i]),)  # type: ignore[assignment]
        sums = added
    offs_m = tl.arange(0, ROWS)[:, None]
    for i in tl.static_range(TILES):
        offs_n = (tile + i) * BN + tl.arange(0, BN)[None, :]
        total = sums[i].T if SWAPPED else sums[i]  # type: ignore[var-annotated]
        tl.store(y + offs_m * N + offs_n, total.to(y.dtype.element_ty), mask=(offs_m < M) & (offs_n < N))


@triton.jit
def _load_block(at, offs_k, k, K, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(at, mask=k + offs_k < K, other=0.0)
    return tl.load(at)


@triton.jit
def _skinny_linear_one_or_two_rows(
    x,
    w,
    y,
    N,
    K,
    ROWS: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EARLY: tl.constexpr,
    MASKED: tl.constexpr,
    PDL: tl.constexpr,
):
    """BN outputs of each row over all of K; weights go straight to registers, the first EARLY blocks before waiting."""
    offs_n, offs_k = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)
    w_block = w + tl.minimum(offs_n, N - 1).to(tl.int64)[:, None] * K + offs_k[None, :]
    early = ()
    for block in tl.static_range(EARLY):
        early += (_load_block(w_block + block * BK, offs_k[None, :], block * BK, K, MASKED),)  # type: ignore[assignment]
    if PDL:
        gdc_wait()
    first, second = tl.zeros([BN, BK], tl.float32), tl.zeros([BN, BK], tl.float32)
    for block in tl.static_range(EARLY):
        weights, at = early[block].to(tl.float32), x + block * BK + offs_k  # type: ignore[var-annotated]
        first += weights * _load_block(at, offs_k, block * BK, K, MASKED).to(tl.float32)[None, :]
        if ROWS == 2:
            second += weights * _load_block(at + K, offs_k, block * BK, K, MASKED).to(tl.float32)[None, :]
    for k in tl.range(EARLY * BK, K, BK, num_stages=1):
        weights = _load_block(w_block + k, offs_k[None, :], k, K, MASKED).to(tl.float32)
        first += weights * _load_block(x + k + offs_k, offs_k, k, K, MASKED).to(tl.float32)[None, :]
        if ROWS == 2:
            second += weights * _load_block(x + K + k + offs_k, offs_k, k, K, MASKED).to(tl.float32)[None, :]
    if PDL:
        gdc_launch_dependents()
    keep = offs_n < N
    tl.store(y + offs_n, tl.sum(first, 1).to(y.dtype.element_ty), mask=keep)
    if ROWS == 2:
        tl.store(y + N + offs_n, tl.sum(second, 1).to(y.dtype.element_ty), mask=keep)


def multiply(rows: Tensor, weight: Tensor, tiling: Tiling, *, pdl: bool) -> Tensor:
    """Return ``rows @ weight.T``.

    Args:
        rows: ``[M, K]``, contiguous, float16 or bfloat16.
        weight: ``[N, K]``, likewise, beginning at a multiple of 16 bytes.
        tiling: from ``choose``.
        pdl: begin before the kernel in front has ended; needs compute capability 9.0.
    """
    (m, k), n = rows.shape, weight.shape[0]
    y = rows.new_empty(m, n)
    programs = -(-n // (tiling.outputs * tiling.tiles))
    shared: dict[str, Any] = {
        "BN": tiling.outputs, "BK": tiling.inputs, "PDL": pdl, "num_warps": 4,
        **({"launch_pdl": True} if pdl else {}),
    }  # fmt: skip
    if tiling.rows <= 2:
        masked = k % tiling.inputs > 0
        _skinny_linear_one_or_two_rows[(programs,)](
            rows, weight, y, n, k, ROWS=m, EARLY=tiling.early, MASKED=masked, **shared
        )
        return y
    blocks_of_rows = TensorDescriptor.from_tensor(rows, [tiling.rows, tiling.inputs])
    blocks_of_weight = TensorDescriptor.from_tensor(weight, [tiling.outputs, tiling.inputs])
    _skinny_linear_tensor_cores[(programs,)](
        blocks_of_rows, blocks_of_weight, y, m, n, k,
        ROWS=tiling.rows, TILES=tiling.tiles, STAGES=tiling.stages, **shared,
    )  # fmt: skip
    return y
