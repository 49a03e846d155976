"""Codes become numbers in the order of the inputs, two neighbours at a time; the PTX is that of ``pair_ptx``."""

# Shapes: BN outputs, BK inputs of a block, G groups of inputs that share scales; what is taken from codes, and what
# numbers are multiplied by and what is added then, are ``[BN, G]``.

# Kernels are Triton's objects, not the functions that a type checker sees.
# mypy: disable-error-code="assignment, var-annotated"
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl

from compiled_llm_ops.packed.kernels.codes import joined_planes, number_of


@triton.jit
def bytes_to_numbers(codes, CODE: tl.constexpr, ASM: tl.constexpr, DTYPE: tl.constexpr):
    """Return the numbers of bytes of one code each."""
    # The types must stand in the calls, here and below: they take no value that is known when a kernel is compiled.
    if ASM == "" and CODE == "e4m3":
        numbers = codes.to(tl.float8e4nv, bitcast=True).to(DTYPE)
    elif ASM == "":
        numbers = number_of(codes.to(tl.int32), CODE).to(DTYPE)
    elif tl.float16 == DTYPE:
        numbers = tl.inline_asm_elementwise(ASM, "=r,h", [codes], dtype=tl.float16, is_pure=True, pack=2)
    else:
        numbers = tl.inline_asm_elementwise(ASM, "=r,h", [codes], dtype=tl.bfloat16, is_pure=True, pack=2)
    return numbers


@triton.jit
def twice(half):
    """Return numbers of 16 bits as both halves of words."""
    return (half.to(tl.uint16, bitcast=True).to(tl.uint32) * 0x10001).to(tl.int32, bitcast=True)


@triton.jit
def half_of(word, DTYPE: tl.constexpr):
    """Return the number in the lower half of words, in float32."""
    return (word & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _plain(code, minus, factor, shift, CODE: tl.constexpr, SCALED: tl.constexpr, DTYPE: tl.constexpr):
    """Return numbers of codes of 4 bits as the PTX makes them."""
    if CODE == "int4":
        number = number_of(code, CODE).to(DTYPE)
    else:
        one: tl.constexpr = 0x6400 if tl.float16 == DTYPE else 0x4300
        number = (code - ((minus & 0xFFFF) - one)).to(tl.float32).to(DTYPE)
    if SCALED:
        number = (number.to(tl.float32) * half_of(factor, DTYPE) + half_of(shift, DTYPE)).to(DTYPE)
    return number


@triton.jit
def halves_to_numbers(
    both, minus, factor, shift,
    BN: tl.constexpr, BK: tl.constexpr, CODE: tl.constexpr, HIGH_FIRST: tl.constexpr, ASM: tl.constexpr,
    SCALED: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Return the numbers ``[BN, BK]`` of bytes ``[BN, BK / 2]`` of two codes each."""
    GROUPS: tl.constexpr = minus.shape[1]
    byte = tl.reshape(both.to(tl.int32), [BN, GROUPS, BK // 2 // GROUPS])
    first, second = _pairs(byte, minus[:, :, None], factor[:, :, None], shift[:, :, None], CODE, HIGH_FIRST, ASM,
                           SCALED, DTYPE)  # fmt: skip
    return tl.reshape(tl.join(first, second), [BN, BK])


@triton.jit
def _pairs(
    byte, minus, factor, shift,
    CODE: tl.constexpr, HIGH_FIRST: tl.constexpr, ASM: tl.constexpr, SCALED: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Return the numbers of both codes of bytes, given as words."""
    if ASM == "":
        low = _plain(byte & 15, minus, factor, shift, CODE, SCALED, DTYPE)
        high = _plain(byte >> 4, minus, factor, shift, CODE, SCALED, DTYPE)
        pair = (high, low) if HIGH_FIRST else (low, high)
    elif SCALED:
        if tl.float16 == DTYPE:
            pair = tl.inline_asm_elementwise(
                ASM, "=h,=h,r,r,r,r", [byte, minus, factor, shift], dtype=(tl.float16, tl.float16), is_pure=True, pack=1
            )
        else:
            pair = tl.inline_asm_elementwise(
                ASM, "=h,=h,r,r,r,r", [byte, minus, factor, shift], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True,
                pack=1,
            )  # fmt: skip
    elif tl.float16 == DTYPE:
        pair = tl.inline_asm_elementwise(
            ASM, "=h,=h,r,r", [byte, minus], dtype=(tl.float16, tl.float16), is_pure=True, pack=1
        )
    else:
        pair = tl.inline_asm_elementwise(
            ASM, "=h,=h,r,r", [byte, minus], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=1
        )
    return pair


@triton.jit
def words_to_numbers(
    words, minus, factor, shift,
    BN: tl.constexpr, BK: tl.constexpr, CODE: tl.constexpr, ASM: tl.constexpr, SCALED: tl.constexpr,
    DTYPE: tl.constexpr, BY_INPUT: tl.constexpr,
):  # fmt: skip
    """Return the numbers ``[BN, BK]`` of words along the inputs ``[BK / 8, BN]``, or the outputs ``[BK, BN / 8]``.

    Of the latter the eight places come one after the other.
    """
    GROUPS: tl.constexpr = minus.shape[1]
    if BY_INPUT:
        # A thread has a byte of a word: the selector of ``prmt`` gets it.
        byte = tl.arange(0, 4)[None, None, None, :]
        of_words = tl.reshape(words.T, [BN, GROUPS, BK // 8 // GROUPS])[:, :, :, None]
        if ASM == "":
            given = (of_words >> (8 * byte)) & 255
        else:
            given = tl.inline_asm_elementwise(
                "prmt.b32 $0, $1, 0, $2;", "=r,r,r", [of_words, byte + 0x4440], dtype=tl.int32, is_pure=True, pack=1
            )
        first, second = _pairs(given, minus[:, :, None, None], factor[:, :, None, None], shift[:, :, None, None], CODE,
                               False, ASM, SCALED, DTYPE)  # fmt: skip
        numbers = tl.reshape(tl.join(first, second), [BN, BK])
    else:
        place = tl.arange(0, 8)[:, None, None, None]
        even, odd = tl.split(tl.reshape(words.T, [BN // 8, GROUPS, BK // 2 // GROUPS, 2]))
        minus = tl.reshape(minus, [8, BN // 8, GROUPS])[:, :, :, None]
        factor = tl.reshape(factor, [8, BN // 8, GROUPS])[:, :, :, None]
        shift = tl.reshape(shift, [8, BN // 8, GROUPS])[:, :, :, None]
        first, second = _of_place(even[None], odd[None], place, minus, factor, shift, CODE, ASM, SCALED, DTYPE)
        numbers = tl.reshape(tl.join(first, second), [BN, BK])
    return numbers


@triton.jit
def _of_place(
    even, odd, place, minus, factor, shift,
    CODE: tl.constexpr, ASM: tl.constexpr, SCALED: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Return the numbers of a place of two words each."""
    selector, by = tl.where(place < 4, 0x5410, 0x7632), 4 * (place % 4)
    if ASM == "":
        pair = (
            _plain((even >> (4 * place)) & 15, minus, factor, shift, CODE, SCALED, DTYPE),
            _plain((odd >> (4 * place)) & 15, minus, factor, shift, CODE, SCALED, DTYPE),
        )
    elif SCALED:
        if tl.float16 == DTYPE:
            pair = tl.inline_asm_elementwise(
                ASM, "=h,=h,r,r,r,r,r,r,r", [even, odd, selector, by, minus, factor, shift],
                dtype=(tl.float16, tl.float16), is_pure=True, pack=1,
            )  # fmt: skip
        else:
            pair = tl.inline_asm_elementwise(
                ASM, "=h,=h,r,r,r,r,r,r,r", [even, odd, selector, by, minus, factor, shift],
                dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=1,
            )  # fmt: skip
    elif tl.float16 == DTYPE:
        pair = tl.inline_asm_elementwise(
            ASM, "=h,=h,r,r,r,r,r", [even, odd, selector, by, minus], dtype=(tl.float16, tl.float16), is_pure=True,
            pack=1,
        )  # fmt: skip
    else:
        pair = tl.inline_asm_elementwise(
            ASM, "=h,=h,r,r,r,r,r", [even, odd, selector, by, minus], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True,
            pack=1,
        )  # fmt: skip
    return pair


@triton.jit
def tiles_to_numbers(
    words, minus, factor, shift,
    BN: tl.constexpr, BK: tl.constexpr, CODE: tl.constexpr, ASM: tl.constexpr, SCALED: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Return the numbers ``[BN, BK]`` of tiles' words ``[BN / 8, BK]``: a word has 8 codes, a tile 8 outputs.

    Groups are one or, in a block of one tile, its pieces.
    """
    # k = 32 piece + 8 eighth + 2 column + neighbour; a word is at 4 column + piece, a place 4 neighbour + eighth
    words = tl.reshape(words, [BN, BK // 128, 4, 4])
    minus, factor, shift = minus[:, None, None, :], factor[:, None, None, :], shift[:, None, None, :]
    if ASM == "":
        places = ()
        for place in tl.static_range(8):
            places += (_plain((words >> (4 * place)) & 15, minus, factor, shift, CODE, SCALED, DTYPE),)
    elif SCALED:
        if tl.float16 == DTYPE:
            places = tl.inline_asm_elementwise(
                ASM, "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r,r", [words, minus, factor, shift],
                dtype=(tl.float16, tl.float16, tl.float16, tl.float16,
                       tl.float16, tl.float16, tl.float16, tl.float16),
                is_pure=True, pack=1,
            )  # fmt: skip
        else:
            places = tl.inline_asm_elementwise(
                ASM, "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r,r", [words, minus, factor, shift],
                dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
                       tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
                is_pure=True, pack=1,
            )  # fmt: skip
    elif tl.float16 == DTYPE:
        places = tl.inline_asm_elementwise(
            ASM, "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [words, minus],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True, pack=1,
        )  # fmt: skip
    else:
        places = tl.inline_asm_elementwise(
            ASM, "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [words, minus],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
                   tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True, pack=1,
        )  # fmt: skip
    parted = tl.reshape(joined_planes(places), [BN, BK // 128, 4, 4, 2, 4])
    return tl.reshape(tl.permute(parted, [0, 1, 3, 5, 2, 4]), [BN, BK])
