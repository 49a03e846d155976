"""Triton kernels for products of few rows with a weight, which read the weight near the bandwidth of memory.

Both may begin while the kernel in front of them ends (see ``overlap``), and have weights on their way by then.

Shapes: M rows, N outputs, K inputs.
"""

# Kernels are Triton's objects, not the functions that a type checker sees.
# pyright: reportIndexIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_llm_ops.arrivals import zeros
from compiled_llm_ops.tiling import Tiling


@triton.jit
def _prefetch(pointers, size, COUNT: tl.constexpr):
    """Ask for ``size`` bytes from each of COUNT addresses on to be brought into L2."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [pointers.to(tl.uint64, bitcast=True), tl.zeros([COUNT], tl.int32) + size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _store(y, acc, offs_n, offs_m, M, N):
    keep = (offs_n[:, None] < N) & (offs_m[None, :] < M)
    tl.store(y + offs_m[None, :] * N + offs_n[:, None], acc.to(y.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["M"])  # 1 and multiples of 16 would be compiled again
def _skinny_linear_tensor_cores(
    x,
    w,
    y,
    partials,
    arrivals,
    M,
    N,
    K,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile of y over one range of K; the last program of a tile sums what all have found, in order.

    ``partials`` holds a [BN, BM] for each program, ``arrivals`` a zero for each tile, which it is again afterwards.
    """
    tile, split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    first, end = split * (K // BK) // SPLITS, (split + 1) * (K // BK) // SPLITS
    offs_n, offs_m, offs_k = tile * BN + tl.arange(0, BN), tl.arange(0, BM), tl.arange(0, BK)
    w_rows = w + tl.minimum(offs_n, N - 1).to(tl.int64) * K
    w_block, x_block = w_rows[:, None] + offs_k[None, :], x + offs_m[:, None] * K + offs_k[None, :]
    live = offs_m[:, None] < M
    if PDL:
        if EARLY:
            _prefetch(w_rows + first * BK, tl.minimum(end - first, EARLY) * BK * 2, BN)
        gdc_wait()
        gdc_launch_dependents()
    # Tensor cores take 64 rows of their first operand at a time, and as few as 8 columns of the second.
    acc = tl.zeros([BN, BM], tl.float32)
    for k in tl.range(first, end, num_stages=STAGES):
        weights = tl.load(w_block + k * BK, eviction_policy="evict_first")
        rows = tl.load(x_block + k * BK, mask=live, other=0.0, eviction_policy="evict_last")
        acc = tl.dot(weights, rows.T, acc)
    if SPLITS == 1:
        _store(y, acc, offs_n, offs_m, M, N)
    else:
        own = tl.arange(0, BN)[:, None] * BM + offs_m[None, :]
        used = (offs_m[None, :] < M) & (own >= 0)
        tl.store(partials + tl.program_id(0) * BN * BM + own, acc, mask=used, cache_modifier=".cg")
        tl.debug_barrier()  # every thread's part is written before one of them says so
        if tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
            total = tl.zeros([BN, BM], tl.float32)
            for s in tl.static_range(SPLITS):
                part = partials + (tile * SPLITS + s) * BN * BM + own
                total += tl.load(part, mask=used, other=0.0, cache_modifier=".cg")
            _store(y, total, offs_n, offs_m, M, N)
            tl.store(arrivals + tile, 0)


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
    tiles = -(-n // tiling.outputs)
    shared: dict[str, Any] = {
        "BN": tiling.outputs, "BK": tiling.inputs, "EARLY": tiling.early, "PDL": pdl, "num_warps": 4,
        **({"launch_pdl": True} if pdl else {}),
    }  # fmt: skip
    if tiling.rows <= 2:
        masked = k % tiling.inputs > 0
        _skinny_linear_one_or_two_rows[(tiles,)](rows, weight, y, n, k, ROWS=m, MASKED=masked, **shared)
        return y
    partials, arrivals = y, y  # neither is touched by the only program of a tile
    if tiling.splits > 1:
        partials = rows.new_empty(tiles * tiling.splits * tiling.outputs * tiling.rows, dtype=torch.float32)
        arrivals = zeros.take(tiles, rows.device)
    _skinny_linear_tensor_cores[(tiles * tiling.splits,)](
        rows, weight, y, partials, arrivals, m, n, k,
        BM=tiling.rows, SPLITS=tiling.splits, STAGES=tiling.stages, **shared,
    )  # fmt: skip
    return y
