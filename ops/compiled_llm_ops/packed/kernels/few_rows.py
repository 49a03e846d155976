"""A matmul of one or two rows with a weight of 8 bits, without tensor cores: weights go straight to registers."""

# Kernels are Triton's objects, not the functions that a type checker sees.
# mypy: disable-error-code="assignment, var-annotated"
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_llm_ops.packed.formats import PackedWeight
from compiled_llm_ops.packed.kernels.codes import number_of
from compiled_llm_ops.packed.kernels.tiles import as_bytes, options
from compiled_llm_ops.packed.tilings import FewRowsTiling


@triton.jit
def _block(at, offs_k, k, K, MASKED: tl.constexpr):
    if MASKED:
        values = tl.load(at, mask=k + offs_k < K, other=0.0 if at.dtype.scalar.element_ty.is_floating() else 0)
    else:
        values = tl.load(at)
    return values


@triton.jit
def _added(
    sums, x, scales_at, codes, offs_k, k, K, scales_k,
    CODE: tl.constexpr, GROUP_K: tl.constexpr, ROWS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return sums ``[BN, BK]`` of each row and the products with a block of codes."""
    weights = codes.to(tl.float32) if CODE == "e4m3" else number_of(codes.to(tl.int32), CODE)
    added = ()
    for row in tl.static_range(ROWS):
        values = _block(x + row * K + k + offs_k, offs_k, k, K, MASKED).to(tl.float32)
        if GROUP_K > 0:
            values *= _block(scales_at + (k + offs_k) // GROUP_K * scales_k, offs_k, k, K, MASKED).to(tl.float32)
        added += (sums[row] + weights * values[None, :],)
    return added


@triton.jit
def _packed_few_rows(
    x, codes, scales, bias, y, N, K, scales_n, scales_k,
    CODE: tl.constexpr, GROUP_N: tl.constexpr, GROUP_K: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, PREFETCHED: tl.constexpr, MASKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute BN outputs of each row over all of K, PREFETCHED blocks of the weight before waiting."""
    # Scales by group are those of all BN outputs, and are multiplied with the rows.
    first = tl.program_id(0) * BN
    offs_n, offs_k = first + tl.arange(0, BN), tl.arange(0, BK)
    at = codes + tl.minimum(offs_n, N - 1).to(tl.int64)[:, None] * K + offs_k[None, :]
    prefetched = ()
    for block in tl.static_range(PREFETCHED):
        prefetched += (_block(at + block * BK, offs_k[None, :], block * BK, K, MASKED),)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    scales_at = scales + (first // GROUP_N * scales_n if GROUP_N > 1 else 0)
    sums = ()
    for _ in tl.static_range(ROWS):
        sums += (tl.zeros([BN, BK], tl.float32),)
    for block in tl.static_range(PREFETCHED):
        sums = _added(
            sums, x, scales_at, prefetched[block], offs_k, block * BK, K, scales_k, CODE, GROUP_K, ROWS, MASKED
        )
    for k in tl.range(PREFETCHED * BK, K, BK, num_stages=1):
        loaded = _block(at + k, offs_k[None, :], k, K, MASKED)
        sums = _added(sums, x, scales_at, loaded, offs_k, k, K, scales_k, CODE, GROUP_K, ROWS, MASKED)
    for row in tl.static_range(ROWS):
        outputs = tl.sum(sums[row], 1)
        if GROUP_K == 0:
            place = 0 if GROUP_N == 0 else tl.minimum(offs_n, N - 1) // GROUP_N * scales_n
            outputs *= tl.load(scales + place).to(tl.float32)
        if bias is not None:
            outputs += tl.load(bias + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)
        tl.store(y + row * N + offs_n, outputs.to(y.dtype.element_ty), mask=offs_n < N)


def multiply_few(
    rows: Tensor, weight: PackedWeight, bias: Tensor | None, tiling: FewRowsTiling, *, pdl: bool
) -> Tensor:
    """Return ``rows @ weight.T + bias`` for one or two rows ``[M, K]``, contiguous, float16 or bfloat16."""
    format, _, scales, _, (n, k), _ = weight
    y = rows.new_empty(len(rows), n)
    prefetched = min(tiling.prefetched, -(-k // tiling.inputs))  # blocks beyond the inputs would be other weights
    _packed_few_rows[(-(-n // tiling.outputs),)](
        rows, as_bytes(weight), scales, bias, y, n, k, *scales.stride(),
        CODE=format.code, GROUP_N=format.outputs, GROUP_K=format.inputs, ROWS=len(rows), BN=tiling.outputs,
        BK=tiling.inputs, PREFETCHED=prefetched, MASKED=k % tiling.inputs > 0, PDL=pdl,
        **options(tiling.warps, pdl),
    )  # fmt: skip
    return y
