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
def halves_at(
    codes, first, N, k, K, blocks,
    CODE: tl.constexpr, LAYOUT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, MASKED: tl.constexpr,
    ASM: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Return the numbers of BN outputs and of BK inputs, those of even and those of odd inputs, ``[BN, BK / 2]``."""
    n = tl.minimum(first + tl.arange(0, BN), N - 1).to(tl.int64)[:, None]
    pair = tl.arange(0, BK // 2)
    both = loaded(codes + n * blocks + k // 2 + pair[None, :], k + 2 * pair, K, MASKED)
    return halves_of(both, CODE, LAYOUT == "high_first", ASM, DTYPE)


@triton.jit
def planes_at(
    codes, first, N, k, K, blocks,
    CODE: tl.constexpr, LAYOUT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, MASKED: tl.constexpr,
    ASM: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Return the numbers of eight inputs of each word, ``[BN, BK / 8]``, or of eight outputs, ``[BK, BN / 8]``."""
    word = tl.arange(0, BK // 8)
    n = tl.minimum(first + tl.arange(0, BN), N - 1).to(tl.int64)[:, None]
    if LAYOUT == "words_by_input":
        words = loaded(codes + (k // 8 + word)[None, :] * blocks + n, k + 8 * word, K, MASKED)
    elif LAYOUT == "words_by_output":
        offs_k, outputs = k + tl.arange(0, BK), tl.minimum(first // 8 + tl.arange(0, BN // 8), N // 8 - 1)
        at = codes + offs_k.to(tl.int64)[:, None] * blocks + outputs[None, :]
        words = tl.load(at, mask=(offs_k < K)[:, None], other=0) if MASKED else tl.load(at)
    else:
        tile = ((n // 8) * blocks + k // 128 + word[None, :] // 16) * 128 + (n % 8) * 16 + word[None, :] % 16
        words = loaded(codes + tile, k + word // 16 * 128, K, MASKED)
    return planes_of(words, CODE, ASM, DTYPE)


@triton.jit
def weights_at(
    codes, first, N, k, K, blocks,
    CODE: tl.constexpr, LAYOUT: tl.constexpr, WAY: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    MASKED: tl.constexpr, ASM: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Return the numbers of BN outputs and BK inputs, ``[BN, BK]``, before they are scaled."""
    if WAY == "bytes":
        n, offs_k = tl.minimum(first + tl.arange(0, BN), N - 1).to(tl.int64)[:, None], k + tl.arange(0, BK)
        weights = numbers_of(loaded(codes + n * blocks + offs_k[None, :], offs_k, K, MASKED), CODE, ASM, DTYPE)
    elif WAY == "halves":
        even, odd = halves_at(codes, first, N, k, K, blocks, CODE, LAYOUT, BN, BK, MASKED, ASM, DTYPE)
        weights = tl.reshape(tl.join(even, odd), [BN, BK])
    elif WAY == "planes":
        planes = planes_at(codes, first, N, k, K, blocks, CODE, LAYOUT, BN, BK, MASKED, ASM, DTYPE)
        if LAYOUT == "words_by_input":
            weights = tl.reshape(joined_planes(planes), [BN, BK])
        elif LAYOUT == "words_by_output":
            p0, p2, p4, p6, p1, p3, p5, p7 = planes  # pyright: ignore[reportAssignmentType]
            weights = tl.reshape(joined_planes((p0, p1, p2, p3, p4, p5, p6, p7)), [BK, BN]).T
        else:
            # k = 32 piece + 8 eighth + 2 column + neighbour; a word is at 4 column + piece, a place 4 neighbour +
            # eighth
            parted = tl.reshape(joined_planes(planes), [BN, BK // 128, 4, 4, 2, 4])
            weights = tl.reshape(tl.permute(parted, [0, 1, 3, 5, 2, 4]), [BN, BK])
    else:
        n, offs_k = tl.minimum(first + tl.arange(0, BN), N - 1).to(tl.int64)[:, None], (k + tl.arange(0, BK))[None, :]
        bits: tl.constexpr = 4 if (CODE == "int4" or CODE == "uint4" or CODE == "nf4") else 8
        weights = number_of(bits_at(codes, n, offs_k, blocks, LAYOUT, bits, offs_k < K), CODE).to(DTYPE)
    return weights


@triton.jit
def joined_planes(planes):
    """Return eight tensors as one, whose last three axes are the bits of a plane's number."""
    p0, p1, p2, p3, p4, p5, p6, p7 = planes
    even = tl.join(tl.join(p0, p4), tl.join(p2, p6))
    return tl.join(even, tl.join(tl.join(p1, p5), tl.join(p3, p7)))


@triton.jit
def loaded(at, k, K, MASKED: tl.constexpr):
    if MASKED:
        values = tl.load(at, mask=(k < K)[None, :], other=0.0 if at.dtype.scalar.element_ty.is_floating() else 0)
    else:
        values = tl.load(at)
    return values


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
