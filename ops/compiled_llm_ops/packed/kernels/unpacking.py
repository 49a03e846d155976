"""Packed weights become plain ones, for matmuls of cuBLAS."""

# Shapes: M rows, N outputs, K inputs.

# Kernels are Triton's objects, not the functions that a type checker sees.
# mypy: disable-error-code="assignment, var-annotated"
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_llm_ops.packed.formats import PackedWeight
from compiled_llm_ops.packed.kernels.codes import loaded, scale_at, shift_at, weights_at
from compiled_llm_ops.packed.kernels.ptx import exact_nf4, text_for
from compiled_llm_ops.packed.kernels.tiles import as_bytes
from compiled_llm_ops.packed.tilings import way_of

UNPACKED_OUTPUTS, UNPACKING_WARPS = 64, 4  # of a program that unpacks


@triton.jit
def _exact_nf4(
    both, ASM: tl.constexpr, ASM_LOW: tl.constexpr, HIGH_FIRST: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """Return the values of bytes of two codes each, ``[BN, BK]``, in float32."""
    low, high = tl.inline_asm_elementwise(
        ASM, "=&r,=&r,=&r,=&r,r", [both], dtype=(tl.int16, tl.int16), is_pure=True, pack=4
    )
    low_rest, high_rest = tl.inline_asm_elementwise(
        ASM_LOW, "=&r,=&r,=&r,=&r,r", [both], dtype=(tl.int16, tl.int16), is_pure=True, pack=4
    )
    first = (low.to(tl.int32) << 16) | (low_rest.to(tl.int32) & 0xFFFF)
    second = (high.to(tl.int32) << 16) | (high_rest.to(tl.int32) & 0xFFFF)
    joined = tl.join(second, first) if HIGH_FIRST else tl.join(first, second)
    return tl.reshape(joined, [BN, BK]).to(tl.float32, bitcast=True)


@triton.jit
def _unpack(
    codes, scales, zeros, nested, values, N, K, blocks, scales_n, scales_k, zeros_n, zeros_k,
    CODE: tl.constexpr, LAYOUT: tl.constexpr, WAY: tl.constexpr, GROUP_N: tl.constexpr, GROUP_K: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, MASKED: tl.constexpr, ASM: tl.constexpr, ASM_LOW: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Write a tile ``[BN, BK]`` of values, whose inputs share scales."""
    first_n, first = tl.program_id(1) * BN, tl.program_id(0) * BK
    n, k = first_n + tl.arange(0, BN), first + tl.arange(0, BK)
    read_n = tl.minimum(n, N - 1)
    if CODE == "nf4" and ASM != "":
        pair = tl.arange(0, BK // 2)
        at = codes + read_n.to(tl.int64)[:, None] * blocks + first // 2 + pair[None, :]
        numbers = _exact_nf4(loaded(at, first + 2 * pair, K, MASKED), ASM, ASM_LOW, LAYOUT == "high_first", BN, BK)
    else:
        numbers = weights_at(codes, first_n, N, first, K, blocks, CODE, LAYOUT, WAY, BN, BK, MASKED, ASM, DTYPE)
        numbers = numbers.to(tl.float32)
    row = read_n // GROUP_N if GROUP_N > 0 else read_n * 0
    group = first // GROUP_K if GROUP_K > 0 else 0
    scale = scale_at(scales, nested, row * scales_n + group * scales_k)
    numbers *= scale[:, None]
    if zeros is not None:
        numbers += shift_at(zeros, row * zeros_n + group * zeros_k, scale, CODE)[:, None]
    at = values + n.to(tl.int64)[:, None] * K + k[None, :]
    mask = (n < N)[:, None] & (k < K)[None, :] if MASKED else (n < N)[:, None]
    tl.store(at, numbers.to(values.dtype.element_ty), mask=mask)


def unpack_into(
    values: Tensor, weight: PackedWeight, inputs: int, outputs: int = UNPACKED_OUTPUTS, warps: int = UNPACKING_WARPS
) -> None:
    """Write the values ``[N, K]``, contiguous, of a weight; ``inputs`` of a program, a power of two, are of a group."""
    format, _, scales, zeros, (n, k), nested = weight
    codes, way = as_bytes(weight), way_of(format, inputs)
    # Numbers of bfloat16 are all but those of NF4, which has a table in float32.
    exact = exact_nf4() if format.code == "nf4" else (text_for(format.code, format.layout, torch.bfloat16), "")
    _unpack[(-(-k // inputs), -(-n // outputs))](
        codes, scales, zeros, nested, values, n, k, codes.shape[1], *scales.stride(),
        *(zeros.stride() if zeros is not None else (0, 0)),
        CODE=format.code, LAYOUT=format.layout, WAY=way, GROUP_N=format.outputs, GROUP_K=format.inputs,
        BN=outputs, BK=inputs, MASKED=k % inputs > 0, ASM="" if way == "gathered" else exact[0], ASM_LOW=exact[1],
        DTYPE=tl.bfloat16 if exact[0] else tl.float32, num_warps=warps,
    )  # fmt: skip
