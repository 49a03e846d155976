"""Packed weights become plain ones, and rows are rounded to e4m3, for matmuls of cuBLAS."""

# Shapes: M rows, N outputs, K inputs.

# Kernels are Triton's objects, not the functions that a type checker sees.
# mypy: disable-error-code="assignment, var-annotated"
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_llm_ops.packed.formats import TILE_INPUTS, PackedWeight
from compiled_llm_ops.packed.kernels.codes import bits_at, number_of, scale_at, shift_at
from compiled_llm_ops.packed.kernels.tiles import as_bytes

_LARGEST: tl.constexpr = tl.constexpr(448.0)  # in e4m3

UNPACKED_OUTPUTS, UNPACKED_INPUTS = 32, 128
"""Outputs and inputs of a program that unpacks."""


@triton.jit
def _unpack(
    codes, scales, zeros, nested, values, N, K, blocks, scales_n, scales_k, zeros_n, zeros_k,
    CODE: tl.constexpr, LAYOUT: tl.constexpr, GROUP_N: tl.constexpr, GROUP_K: tl.constexpr, BITS: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Write a tile ``[BN, BK]`` of values, whose inputs share scales."""
    n, first = tl.program_id(1) * BN + tl.arange(0, BN), tl.program_id(0) * BK
    k = first + tl.arange(0, BK)
    read_n, mask = tl.minimum(n, N - 1), (k < K)[None, :]
    rows = read_n.to(tl.int64)[:, None]
    if LAYOUT == "rows" and BITS == 8:
        found = tl.load(codes + rows * blocks + k[None, :], mask=mask, other=0.0 if CODE == "e4m3" else 0)
        numbers = found.to(tl.float32) if CODE == "e4m3" else number_of(found.to(tl.int32), CODE)
    elif LAYOUT == "rows" or LAYOUT == "high_first":
        pair = first // 2 + tl.arange(0, BK // 2)
        both = tl.load(codes + rows * blocks + pair[None, :], mask=(2 * pair < K)[None, :], other=0).to(tl.int32)
        low, high = number_of(both & 15, CODE), number_of(both >> 4, CODE)
        joined = tl.join(low, high) if LAYOUT == "rows" else tl.join(high, low)
        numbers = tl.reshape(joined, [BN, BK])
    else:
        numbers = number_of(bits_at(codes, rows, k[None, :], blocks, LAYOUT, BITS, mask), CODE)
    row = read_n // GROUP_N if GROUP_N > 0 else read_n * 0
    group = first // GROUP_K if GROUP_K > 0 else 0
    scale = scale_at(scales, nested, row * scales_n + group * scales_k)
    numbers *= scale[:, None]
    if zeros is not None:
        numbers += shift_at(zeros, row * zeros_n + group * zeros_k, scale, CODE)[:, None]
    at = values + n.to(tl.int64)[:, None] * K + k[None, :]
    tl.store(at, numbers.to(values.dtype.element_ty), mask=(n < N)[:, None] & mask)


def unpack_into(weight: PackedWeight, inputs: int, dtype: torch.dtype) -> Tensor:
    """Return the values ``[N, K]`` of a weight; ``inputs`` of a program, a power of two, are of one group."""
    format, _, scales, zeros, (n, k), nested = weight
    codes, values = as_bytes(weight), scales.new_empty(n, k, dtype=dtype)
    _unpack[(-(-k // inputs), -(-n // UNPACKED_OUTPUTS))](
        codes, scales, zeros, nested, values, n, k, codes.shape[1], *scales.stride(),
        *(zeros.stride() if zeros is not None else (0, 0)),
        CODE=format.code, LAYOUT=format.layout, GROUP_N=format.outputs, GROUP_K=format.inputs, BITS=format.bits,
        BN=UNPACKED_OUTPUTS, BK=inputs,
    )  # fmt: skip
    return values


@triton.jit(do_not_specialize=["M"])
def _round(x, rounded, scales, M, K, padded, ROWS: tl.constexpr, BK: tl.constexpr):
    """Round rows by BK inputs, and write their scales ``[K / BK, padded]``; rows that are padding become zeros."""
    m, group = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    k = group * BK + tl.arange(0, BK)
    values = tl.load(x + m[:, None] * K + k[None, :], mask=(m < M)[:, None], other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values), 1), 1e-12) / _LARGEST
    tl.store(rounded + m[:, None] * K + k[None, :], (values / scale[:, None]).to(rounded.dtype.element_ty))
    tl.store(scales + group * padded + m, scale)


def round_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows ``[M, K]`` in e4m3, padded to a multiple of 8, and their scales by 128 inputs, the rows first."""
    (m, k), size = rows.shape, 8
    padded = -(-m // size) * size
    rounded = rows.new_empty(padded, k, dtype=torch.float8_e4m3fn)
    scales = rows.new_empty(k // TILE_INPUTS, padded, dtype=torch.float32)
    _round[(padded // size, k // TILE_INPUTS)](rows, rounded, scales, m, k, padded, ROWS=size, BK=TILE_INPUTS)
    return rounded, scales.t()
