"""Triton kernels for products of few rows with a weight, which read the weight near the bandwidth of memory.

Both begin while the kernel in front of them ends (programmatic dependent launch). For that, nothing but weights may be
asked for before ``gdc_wait``, and the next kernel is let go only after the last read: a kernel of Inductor's waits only
for the one directly in front of it, and may write where our inputs were.

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
    PREFETCH: tl.constexpr,
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
        if PREFETCH:
            _prefetch(w_rows + first * BK, tl.minimum(end - first, 2) * BK * 2, BN)
        gdc_wait()
    # Tensor cores take 64 rows of their first operand at a time, and as few as 8 columns of the second.
    acc = tl.zeros([BN, BM], tl.float32)
    for k in tl.range(first, end, num_stages=STAGES):
        weights = tl.load(w_block + k * BK, eviction_policy="evict_first")
        rows = tl.load(x_block + k * BK, mask=live, other=0.0, eviction_policy="evict_last")
        acc = tl.dot(weights, rows.T, acc)
    if SPLITS == 1:
        if PDL:
            gdc_launch_dependents()
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


@triton.jit(do_not_specialize=["M"])
def _skinny_linear_one_or_two_rows(
    x, w, y, M, N, K, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr
):
    """BN outputs of each row over all of K; weights go straight to registers. One row is computed twice."""
    offs_n, offs_k = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)
    w_block = w + tl.minimum(offs_n, N - 1).to(tl.int64)[:, None] * K + offs_k[None, :]
    x_first, x_last = x + offs_k, x + (M - 1) * K + offs_k
    first, last = tl.zeros([BN, BK], tl.float32), tl.zeros([BN, BK], tl.float32)
    if PDL:
        gdc_wait()
    for k in tl.range(0, K // BK, num_stages=STAGES):
        weights = tl.load(w_block + k * BK).to(tl.float32)
        first += weights * tl.load(x_first + k * BK).to(tl.float32)[None, :]
        last += weights * tl.load(x_last + k * BK).to(tl.float32)[None, :]
    if PDL:
        gdc_launch_dependents()
    offs_m = tl.arange(0, 2)
    acc = tl.where(offs_m[None, :] == 0, tl.sum(first, 1)[:, None], tl.sum(last, 1)[:, None])
    _store(y, acc, offs_n, offs_m, M, N)


def multiply(rows: Tensor, weight: Tensor, tiling: Tiling, *, pdl: bool = True) -> Tensor:
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
        "BN": tiling.outputs, "BK": tiling.inputs, "STAGES": tiling.stages, "PDL": pdl, "num_warps": 4,
        **({"launch_pdl": True} if pdl else {}),
    }  # fmt: skip
    if tiling.rows == 2:
        _skinny_linear_one_or_two_rows[(tiles,)](rows, weight, y, m, n, k, **shared)
        return y
    partials, arrivals = y, y  # neither is touched by the only program of a tile
    if tiling.splits > 1:
        partials = rows.new_empty(tiles * tiling.splits * tiling.outputs * tiling.rows, dtype=torch.float32)
        arrivals = zeros.take(tiles, rows.device)
    _skinny_linear_tensor_cores[(tiles * tiling.splits,)](
        rows, weight, y, partials, arrivals, m, n, k,
        BM=tiling.rows, SPLITS=tiling.splits, PREFETCH=tiling.prefetch, **shared,
    )  # fmt: skip
    return y
