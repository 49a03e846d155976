"""Triton kernels for matmuls and sums in which a row's bits do not depend on the number of rows, or on its place."""

# Shapes: M rows, N outputs, K inputs, I numbers of a row.

# Kernels are Triton's objects, not the functions that a type checker sees.
# mypy: disable-error-code="assignment, var-annotated"
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from compiled_llm_ops.kernels.linear.invariant_tiling import (
    GROUPED,
    HEADS_TILE,
    HEADS_TILE_OF_FLOAT32,
    SUMMED,
    InvariantLinearTiling,
)
from compiled_llm_ops.kernels.linear.skinny import after_waiting

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@triton.jit(do_not_specialize=["M"])  # one kernel for all batches
def _invariant_linear(
    x, w, bias, y, M, N, K, output_stride, input_stride,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, STAGES: tl.constexpr, GROUPED: tl.constexpr,
    DESCRIBED: tl.constexpr, SWAPPED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply ROWS rows with OUTPUTS rows of the weight, over all inputs in ascending order."""
    # If they are DESCRIBED, ``x`` and ``w`` are descriptors, which read zeros outside; else addresses. If SWAPPED,
    # which they are then, the product is ``[OUTPUTS, ROWS]``. The first block of weights that descriptors read is on
    # its way before the kernel waits.
    if PDL and not DESCRIBED:
        gdc_wait()
        gdc_launch_dependents()
    row_tiles, output_tiles = tl.cdiv(M, ROWS), tl.cdiv(N, OUTPUTS)
    in_group = GROUPED * output_tiles
    first = tl.program_id(0) // in_group * GROUPED
    size = tl.minimum(row_tiles - first, GROUPED)
    row_tile, output_tile = first + tl.program_id(0) % in_group % size, tl.program_id(0) % in_group // size
    offs_m, offs_n = row_tile * ROWS + tl.arange(0, ROWS), output_tile * OUTPUTS + tl.arange(0, OUTPUTS)
    if SWAPPED:
        total = tl.zeros([OUTPUTS, ROWS], tl.float32)
        for k in tl.range(0, K, INPUTS, num_stages=STAGES):
            weight = w.load([output_tile * OUTPUTS, k])
            rows = x.load([row_tile * ROWS, after_waiting(k) if PDL else k])
            total = tl.dot(weight, rows.T, total, input_precision="ieee")
    elif DESCRIBED:
        total = tl.zeros([ROWS, OUTPUTS], tl.float32)
        for k in tl.range(0, K, INPUTS, num_stages=STAGES):
            weight = w.load([output_tile * OUTPUTS, k])
            rows = x.load([row_tile * ROWS, after_waiting(k) if PDL else k])
            total = tl.dot(rows, weight.T, total, input_precision="ieee")
    else:
        total = tl.zeros([ROWS, OUTPUTS], tl.float32)
        offs_k = tl.arange(0, INPUTS)
        x_ptrs = x + offs_m.to(tl.int64)[:, None] * K + offs_k[None, :]
        w_ptrs = w + offs_n.to(tl.int64)[None, :] * output_stride + offs_k[:, None].to(tl.int64) * input_stride
        for k in tl.range(0, K, INPUTS, num_stages=STAGES):
            inside = k + offs_k < K
            rows = tl.load(x_ptrs + k, mask=(offs_m < M)[:, None] & inside[None, :], other=0.0)
            weight = tl.load(w_ptrs, mask=inside[:, None] & (offs_n < N)[None, :], other=0.0)
            w_ptrs += INPUTS * input_stride
            total = tl.dot(rows, weight, total, input_precision="ieee")
    offs_m, offs_n = (offs_m[None, :], offs_n[:, None]) if SWAPPED else (offs_m[:, None], offs_n[None, :])
    if bias is not None:
        total += tl.load(bias + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)
    at = offs_m.to(tl.int64) * N + offs_n
    tl.store(y + at, total.to(y.dtype.element_ty), mask=(offs_m < M) & (offs_n < N))


def described(weight: Tensor) -> bool:
    """Whether the tensor memory accelerator can read a weight, and rows that it is multiplied with."""
    return weight.is_contiguous() and weight.data_ptr() % 16 == 0 and weight.stride(0) * weight.element_size() % 16 == 0


def multiply(
    rows: Tensor, weight: Tensor, bias: Tensor | None, tiling: InvariantLinearTiling, pdl: bool = False
) -> Tensor:
    """Return ``rows @ weight.T + bias``, ``[M, N]``, contiguous; only tilings of the rule have equal bits."""
    # Rows ``[M, K]`` are contiguous, and begin at a multiple of 16 bytes; bias ``[N]`` is contiguous. ValueError if
    # there is no kernel for the dtype.
    if rows.dtype not in DTYPES:
        raise ValueError(
            f"invariant_linear: no kernel for {rows.dtype} on CUDA; use torch.bfloat16, torch.float16 or torch.float32"
        )
    (m, k), n = rows.shape, weight.shape[0]
    y = rows.new_empty(m, n)
    if not m or not n:
        return y
    x, w = rows, weight
    if described(weight):
        x = TensorDescriptor.from_tensor(rows, [tiling.rows, tiling.inputs])
        w = TensorDescriptor.from_tensor(weight, [tiling.outputs, tiling.inputs])
    _invariant_linear[(-(-m // tiling.rows) * -(-n // tiling.outputs),)](
        x, w, bias, y, m, n, k, *weight.stride(), ROWS=tiling.rows, OUTPUTS=tiling.outputs, INPUTS=tiling.inputs,
        STAGES=tiling.stages, GROUPED=GROUPED, DESCRIBED=described(weight), SWAPPED=tiling.swapped, PDL=pdl,
        num_warps=tiling.warps, enable_fp_fusion=False, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return y


# One kernel for all batches: neither strides nor addresses that come with a batch make another one of it.
@triton.jit(do_not_specialize=["M", "row_stride"], do_not_specialize_on_alignment=["x"])
def _invariant_bmm(
    x, w, y, M, row_stride, head_stride, input_stride, weight_head_stride, weight_input_stride, weight_output_stride,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Multiply ROWS rows of a head with OUTPUTS columns of its matrix, over all inputs in ascending order."""
    head = tl.program_id(2).to(tl.int64)
    offs_m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    offs_n, offs_k = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, INPUTS)
    own_x = x + head * head_stride + offs_m.to(tl.int64)[:, None] * row_stride
    own_w = w + head * weight_head_stride + offs_n[None, :] * weight_output_stride
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for k in tl.range(0, K, INPUTS):
        at = k + offs_k
        rows = tl.load(own_x + at[None, :] * input_stride, mask=(offs_m < M)[:, None] & (at < K)[None, :], other=0.0)
        matrix = own_w + at[:, None] * weight_input_stride
        weight = tl.load(matrix, mask=(at < K)[:, None] & (offs_n < N)[None, :], other=0.0)
        total = tl.dot(rows, weight, total, input_precision="ieee")
    out = y + (head * M + offs_m.to(tl.int64)[:, None]) * N + offs_n[None, :]
    tl.store(out, total.to(y.dtype.element_ty), mask=(offs_m < M)[:, None] & (offs_n < N)[None, :])


def multiply_each(rows: Tensor, matrices: Tensor) -> Tensor:
    """Return ``rows[h] @ matrices[h]`` of each head, ``[H, M, N]``, contiguous; ValueError for other dtypes."""
    if rows.dtype not in DTYPES:
        raise ValueError(
            f"invariant_bmm: no kernel for {rows.dtype} on CUDA; use torch.bfloat16, torch.float16 or torch.float32"
        )
    rows = rows if rows.stride(2) == 1 else rows.contiguous()
    (heads, m, k), n = rows.shape, matrices.shape[2]
    y = rows.new_empty(heads, m, n)
    tile = HEADS_TILE if rows.element_size() == 2 else HEADS_TILE_OF_FLOAT32
    if y.numel():
        _invariant_bmm[(-(-n // tile.outputs), -(-m // tile.rows), heads)](
            rows, matrices, y, m, rows.stride(1), rows.stride(0), rows.stride(2), *matrices.stride(), N=n, K=k,
            ROWS=tile.rows, OUTPUTS=tile.outputs, INPUTS=tile.inputs, num_warps=tile.warps, num_stages=tile.stages,
            enable_fp_fusion=False,
        )  # fmt: skip
    return y


@triton.jit(do_not_specialize_on_alignment=["values"])
def _invariant_sum(values, sums, INPUTS: tl.constexpr, BLOCK: tl.constexpr):
    """Add the numbers of one row in float32: in each place of a block first, then over the block."""
    offs = tl.arange(0, BLOCK)
    row = values + tl.program_id(0).to(tl.int64) * INPUTS
    total = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, INPUTS, BLOCK):
        total += tl.load(row + start + offs, mask=start + offs < INPUTS, other=0.0).to(tl.float32)
    tl.store(sums + tl.program_id(0), tl.sum(total, 0).to(sums.dtype.element_ty))


def sum_rows(values: Tensor) -> Tensor:
    """Return the sums ``[M]`` of ``values`` ``[M, I]``, contiguous and on the current device, in their dtype."""
    rows, inputs = values.shape
    sums = values.new_empty(rows)
    if rows:
        block = min(SUMMED, triton.next_power_of_2(max(1, inputs)))
        _invariant_sum[(rows,)](values, sums, INPUTS=inputs, BLOCK=block, num_warps=4 if block > 256 else 1)
    return sums
