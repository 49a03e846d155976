"""How Triton kernels read codes and scales of packed weights; see ``formats``."""

# Shapes: BN outputs, BK inputs of a block.

# Kernels are Triton's objects, not the functions that a type checker sees.
# mypy: disable-error-code="assignment, var-annotated"
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl

from compiled_llm_ops.packed import formats

_NF4: tl.constexpr = tl.constexpr(formats.NF4)
_NESTED_CODES: tl.constexpr = tl.constexpr(formats.NESTED_CODES)
_NESTED_BLOCK: tl.constexpr = tl.constexpr(formats.NESTED_BLOCK)


@triton.jit
def number_of(code, CODE: tl.constexpr):
    """Return what unsigned codes (int32) stand for, in float32; 8 or 128 less if they are unsigned."""
    if CODE == "nf4":
        value = tl.full(code.shape, _NF4[0], tl.float32)
        for i in tl.static_range(1, 16):
            value = tl.where(code == i, _NF4[i], value)
    else:
        half: tl.constexpr = 8 if (CODE == "int4" or CODE == "uint4") else 128
        if CODE == "int4" or CODE == "int8":
            code = code ^ half
        value = (code - half).to(tl.float32)
    return value


@triton.jit
def halves_of(codes, CODE: tl.constexpr, HIGH_FIRST: tl.constexpr, ASM: tl.constexpr, DTYPE: tl.constexpr):
    """Return the numbers of even and of odd inputs for bytes of two codes each."""
    # The types must stand in the calls, here and below: they take no value that is known when a kernel is compiled.
    if ASM != "":
        if tl.float16 == DTYPE:
            low, high = tl.inline_asm_elementwise(
                ASM, "=&r,=&r,=&r,=&r,r", [codes], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
            )
        else:
            low, high = tl.inline_asm_elementwise(
                ASM, "=&r,=&r,=&r,=&r,r", [codes], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
            )
    else:
        both = codes.to(tl.int32)
        low, high = number_of(both & 15, CODE).to(DTYPE), number_of(both >> 4, CODE).to(DTYPE)
    return (high, low) if HIGH_FIRST else (low, high)


@triton.jit
def numbers_of(codes, CODE: tl.constexpr, ASM: tl.constexpr, DTYPE: tl.constexpr):
    """Return the numbers of bytes of one code each."""
    if ASM != "":
        if tl.float16 == DTYPE:
            numbers = tl.inline_asm_elementwise(ASM, "=&r,=&r,r", [codes], dtype=tl.float16, is_pure=True, pack=4)
        else:
            numbers = tl.inline_asm_elementwise(ASM, "=&r,=&r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)
    elif CODE == "e4m3":
        numbers = codes.to(DTYPE)
    else:
        numbers = number_of(codes.to(tl.int32), CODE).to(DTYPE)
    return numbers


@triton.jit
def planes_of(words, CODE: tl.constexpr, ASM: tl.constexpr, DTYPE: tl.constexpr):
    """Return the numbers of words of eight codes each, those of the lowest bits first."""
    planes = ()
    if ASM != "":
        if tl.float16 == DTYPE:
            planes = tl.inline_asm_elementwise(
                ASM, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r", [words],
                dtype=(tl.float16, tl.float16, tl.float16, tl.float16,
                       tl.float16, tl.float16, tl.float16, tl.float16),
                is_pure=True, pack=2,
            )  # fmt: skip
        else:
            planes = tl.inline_asm_elementwise(
                ASM, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r", [words],
                dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
                       tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
                is_pure=True, pack=2,
            )  # fmt: skip
    else:
        for plane in tl.static_range(8):
            planes += (number_of((words >> (4 * plane)) & 15, CODE).to(DTYPE),)
    return planes


@triton.jit
def bits_at(codes, n, k, blocks, LAYOUT: tl.constexpr, BITS: tl.constexpr, mask):
    """Return the unsigned codes (int32) of outputs ``n`` and inputs ``k``, which broadcast, one by one."""
    each: tl.constexpr = (8 if (LAYOUT == "rows" or LAYOUT == "high_first") else 32) // BITS
    if LAYOUT == "rows":
        at, place = n * blocks + k // each, k % each
    elif LAYOUT == "high_first":
        at, place = n * blocks + k // each, 1 - k % each
    elif LAYOUT == "words_by_input":
        at, place = (k // each) * blocks + n, k % each
    elif LAYOUT == "words_by_output":
        # Outputs 0, 2, 4, 6, 1, 3, 5 and 7 are in a word, the lowest bits first.
        at, place = k * blocks + n // 8, (n % 8) // 2 + (n % 2) * 4
    else:
        column, piece, inside = (k % 8) // 2, (k % 128) // 32, k % 32
        at = ((n // 8) * blocks + k // 128) * 128 + (n % 8) * 16 + column * 4 + piece
        place = inside // 8 + (inside % 2) * 4
    found = tl.load(codes + at, mask=mask, other=0).to(tl.int32)
    return (found >> (place * BITS).to(tl.int32)) & ((1 << BITS) - 1)


@triton.jit
def scale_at(scales, nested, place):
    """Return the scales at places of their table, in float32."""
    if nested is None:
        scale = tl.load(scales + place).to(tl.float32)
    else:
        value = tl.load(nested + tl.load(scales + place).to(tl.int32))
        factor = tl.load(nested + _NESTED_CODES + 1 + place // _NESTED_BLOCK)
        scale = value * factor + tl.load(nested + _NESTED_CODES)
    return scale


@triton.jit
def shift_at(zeros, place, scale, CODE: tl.constexpr):
    """Return what is added after scaling, in float32, for codes less 8 or 128."""
    zero = tl.load(zeros + place)
    if zeros.dtype.element_ty.is_floating():
        shift = zero.to(tl.float32)
    else:
        half: tl.constexpr = 8 if CODE == "uint4" else 128
        shift = (half - zero.to(tl.int32)).to(tl.float32) * scale
    return shift
