"""Codes of NF4 become numbers that are scaled, in the order of the inputs; the PTX is that of ``pair_ptx``."""

# Few inputs share a scale. Sums of so few would have to leave tensor cores to be scaled, and be added up beside them:
# with 128 rows, that takes longer than the products do. So numbers are scaled, each rounded once, as the library does.
# Shapes: BN outputs, BK inputs of a block, G groups of inputs that share a scale.

# Kernels are Triton's objects, not the functions that a type checker sees.
# mypy: disable-error-code="assignment, var-annotated"
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl

from compiled_llm_ops.packed import formats
from compiled_llm_ops.packed.kernels.codes import number_of, scale_at
from compiled_llm_ops.packed.kernels.pairs import half_of, twice

_UNIT: tl.constexpr = tl.constexpr(formats.NF4_UNIT)


@triton.jit
def nf4_scales_at(
    scales, nested, place, k, K, scales_k,
    GROUP_K: tl.constexpr, BK: tl.constexpr, MASKED: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Return a block's scales ``[BN, G]`` as sums of two numbers of the rows' type, both as halves of words."""
    GROUPS: tl.constexpr = BK // GROUP_K if BK > GROUP_K else 1
    group = k // GROUP_K + tl.arange(0, GROUPS)
    if MASKED:
        group = tl.minimum(group, (K - 1) // GROUP_K)
    scale = scale_at(scales, nested, place[:, None] + group[None, :] * scales_k) / _UNIT
    high = scale.to(DTYPE)
    return twice(high), twice((scale - high.to(tl.float32)).to(DTYPE))


@triton.jit
def nf4_to_numbers(
    both, high, low,
    BN: tl.constexpr, BK: tl.constexpr, HIGH_FIRST: tl.constexpr, ASM: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Return the numbers ``[BN, BK]`` of bytes ``[BN, BK / 2]`` of two codes each, by the scales of their groups."""
    GROUPS: tl.constexpr = high.shape[1]
    both = tl.reshape(both, [BN, GROUPS, BK // 2 // GROUPS])
    high, low = high[:, :, None], low[:, :, None]
    # The types must stand in the calls: they take no value that is known when a kernel is compiled.
    if ASM == "":
        code, scale = both.to(tl.int32), half_of(high, DTYPE) + half_of(low, DTYPE)
        first, second = _scaled(code & 15, scale, DTYPE), _scaled(code >> 4, scale, DTYPE)
        if HIGH_FIRST:
            first, second = second, first
    elif tl.float16 == DTYPE:
        first, second = tl.inline_asm_elementwise(
            ASM, "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r", [both, high, low], dtype=(tl.float16, tl.float16), is_pure=True,
            pack=4,
        )  # fmt: skip
    else:
        first, second = tl.inline_asm_elementwise(
            ASM, "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r", [both, high, low], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True,
            pack=4,
        )  # fmt: skip
    return tl.reshape(tl.join(first, second), [BN, BK])


@triton.jit
def _scaled(code, scale, DTYPE: tl.constexpr):
    """Return numbers of codes as the PTX makes them."""
    number = (number_of(code, "nf4") * _UNIT).to(DTYPE)
    return (number.to(tl.float32) * scale).to(DTYPE)
