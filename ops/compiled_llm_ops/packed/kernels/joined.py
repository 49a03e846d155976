"""A matmul of some rows with a packed weight on tensor cores, whose codes become numbers in the order of the inputs."""

# A weight is the first operand, from registers. Each thread makes the numbers that its instruction takes: two
# neighbouring inputs of an output at a time, from a byte of codes or from the words that have them.
# Blocks of rows and of codes come by TMA. It fills in zeros outside, but for rows that takes it longer than to read
# them: a product of 129 rows with tiles of 128 took twice the time of one of 256. So a tile that rows do not fill
# begins earlier, or has its two halves overlap. Some rows are computed and stored twice then, with the same bits.
# Before a program waits for the previous kernel, it reads codes, scales and zeros, as all kernels of packed weights do
# (see ``pdl``). A model's are written by no kernel of its programs. Who writes them (new weights, weights that come
# back from host memory, tables that readers make) has waited for the device before a program is launched.
# Shapes: M rows, N outputs, K inputs.

# Kernels are Triton's objects, not the functions that a type checker sees.
# mypy: disable-error-code="assignment, var-annotated"
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from compiled_llm_ops.kernels.linear.skinny import after_waiting
from compiled_llm_ops.packed.formats import TILE_OUTPUTS, TILE_PIECE, PackedWeight
from compiled_llm_ops.packed.kernels.codes import scale_at
from compiled_llm_ops.packed.kernels.nf4 import nf4_scales_at, nf4_to_numbers
from compiled_llm_ops.packed.kernels.pair_ptx import pair_text_for
from compiled_llm_ops.packed.kernels.pairs import (
    bytes_to_numbers,
    halves_to_numbers,
    tiles_to_numbers,
    twice,
    words_to_numbers,
)
from compiled_llm_ops.packed.kernels.tiles import ended, finish_tile, options, parts_of
from compiled_llm_ops.packed.tilings import FEWEST_HALVED, MOST_TOGETHER, PackedLinearTiling, has_scaled_numbers

_PIECE: tl.constexpr = tl.constexpr(TILE_PIECE)


@triton.jit
def _outputs(first, BN: tl.constexpr, LAYOUT: tl.constexpr):
    """Return which outputs a tile's rows are: with words along the outputs, those of a place come together."""
    row = tl.arange(0, BN)
    if LAYOUT == "words_by_output":
        place = row // (BN // 8)
        row = row % (BN // 8) * 8 + place * 2 % 8 + place // 4
    return first + row


@triton.jit
def _weights(
    codes, first, k, minus, factor, shift,
    CODE: tl.constexpr, LAYOUT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ASM: tl.constexpr,
    SCALED: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Return the numbers of BN outputs and BK inputs, ``[BN, BK]``, less ``minus`` ``[BN, G]``, scaled if SCALED."""
    if LAYOUT == "words_by_output":
        words = codes.load([k, first // 8])
        weights = words_to_numbers(words, minus, factor, shift, BN, BK, CODE, ASM, SCALED, DTYPE, False)
    elif LAYOUT == "words_by_input":
        words = codes.load([k // 8, first])
        weights = words_to_numbers(words, minus, factor, shift, BN, BK, CODE, ASM, SCALED, DTYPE, True)
    elif LAYOUT == "tiles":
        words = codes.load([first // 8, k])
        weights = tiles_to_numbers(words, minus, factor, shift, BN, BK, CODE, ASM, SCALED, DTYPE)
    elif CODE == "int8" or CODE == "uint8" or CODE == "e4m3":
        weights = bytes_to_numbers(codes.load([first, k]), CODE, ASM, DTYPE)
    else:
        both = codes.load([first, k // 2])
        weights = halves_to_numbers(
            both, minus, factor, shift, BN, BK, CODE, LAYOUT == "high_first", ASM, SCALED, DTYPE
        )
    return weights


@triton.jit
def _rows_at(x, first, k, ROWS: tl.constexpr, BK: tl.constexpr):
    """Return a block of rows ``[ROWS, BK]``; see ``_blocks_of``."""
    return tl.reshape(x.load([0, first, k]), [ROWS, BK]) if len(x.block_shape) == 3 else x.load([first, k])


@triton.jit
def _scaling_at(
    scales, zeros, place, zeros_place, k, K, scales_k, zeros_k,
    CODE: tl.constexpr, LAYOUT: tl.constexpr, GROUP_K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    MASKED: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Return what is taken from a block's codes, what numbers are multiplied by, and what is added, ``[BN, G]``.

    Numbers of the rows' type are both halves of words.
    """
    SHORT: tl.constexpr = GROUP_K > 0 and GROUP_K < BK
    GROUPS: tl.constexpr = (BK // (_PIECE if LAYOUT == "tiles" else GROUP_K)) if SHORT else 1
    group = tl.arange(0, GROUPS)
    if GROUP_K > 0:
        group = (k + group * (BK // GROUPS)) // GROUP_K
    if MASKED:
        group = tl.minimum(group, (K - 1) // GROUP_K)
    factor = twice(tl.load(scales + place[:, None] + group[None, :] * scales_k))
    minus, shift = tl.full([BN, GROUPS], _minus_centre(DTYPE), tl.int32), factor * 0
    if zeros is not None:
        at = zeros + zeros_place[:, None] + group[None, :] * zeros_k
        if zeros.dtype.element_ty.is_floating():
            shift = twice(tl.load(at))
        else:
            minus = _minus_at(at, CODE, DTYPE)
    return minus, factor, shift


@triton.constexpr_function
def _minus_centre(dtype):
    """Return what is taken from codes without zeros of integers, whose centre is 8; see ``_minus_at``."""
    return 0x64086408 if dtype == tl.float16 else 0x43084308


@triton.jit
def _minus_at(at, CODE: tl.constexpr, DTYPE: tl.constexpr):
    """Return what is taken from codes that are joined with a number's bits: that number, and zeros."""
    one: tl.constexpr = 0x6400 if tl.float16 == DTYPE else 0x4300
    return (tl.load(at).to(tl.int32) + one) * 0x10001


@triton.jit(do_not_specialize=["M", "splits"])  # Triton would compile again for 1 and for multiples of 16
def _packed_joined(
    x, codes, scales, zeros, nested, bias, y, parts, counters,
    M, N, K, scales_n, scales_k, zeros_n, zeros_k, splits,
    codes_2, scales_2, zeros_2, nested_2, scales_k_2, zeros_k_2, begin_2,
    codes_3, scales_3, zeros_3, nested_3, scales_k_3, zeros_k_3, begin_3,
    CODE: tl.constexpr, LAYOUT: tl.constexpr, GROUP_N: tl.constexpr, GROUP_K: tl.constexpr, ROWS: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, SPLIT: tl.constexpr, SCALED: tl.constexpr,
    MASKED: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute BN outputs of ROWS rows over a part of the inputs; the last program of a tile sums all parts.

    Outputs are those of up to three weights; a second one's begin at ``begin_2``, a multiple of BN.
    """
    dtype: tl.constexpr = y.dtype.element_ty
    tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    first_row = tl.minimum(tl.program_id(0) * ROWS, tl.maximum(M - ROWS, 0))
    first, part = tl.program_id(1) * BN, tl.program_id(2)
    own = first  # among the outputs of its weight; descriptors are arguments, of which a program takes its tile's
    if codes_2 is not None:
        later = first >= begin_2
        if later:
            codes, scales, own = codes_2, scales_2, first - begin_2
            if zeros is not None:
                zeros = zeros_2
            if nested is not None:
                nested = nested_2
        scales_k, zeros_k = tl.where(later, scales_k_2, scales_k), tl.where(later, zeros_k_2, zeros_k)
    if codes_3 is not None:
        later = first >= begin_3
        if later:
            codes, scales, own = codes_3, scales_3, first - begin_3
            if zeros is not None:
                zeros = zeros_3
            if nested is not None:
                nested = nested_3
        scales_k, zeros_k = tl.where(later, scales_k_3, scales_k), tl.where(later, zeros_k_3, zeros_k)
    outputs = _outputs(own, BN, LAYOUT)
    steps = tl.cdiv(K, BK)
    each = tl.cdiv(steps, splits)
    begin = part * each
    end = tl.minimum(begin + each, steps)
    # One scale for all outputs of the tile, or one for each
    ALIKE: tl.constexpr = GROUP_N % BN == 0
    NF4: tl.constexpr = CODE == "nf4"
    SUMS_SCALED: tl.constexpr = GROUP_K > 0 and not SCALED  # those of each block
    STEPS: tl.constexpr = GROUP_K // BK if SUMS_SCALED else 1 << 30
    INTEGERS: tl.constexpr = zeros is not None and not SCALED
    ONE_GROUP: tl.constexpr = SCALED and not NF4 and (GROUP_K == 0 or GROUP_K >= BK)
    if GROUP_N == 0:
        rows_of_scales = own * 0
    elif ALIKE:
        rows_of_scales = own // GROUP_N
    else:
        rows_of_scales = tl.minimum(outputs, N - first + own - 1) // GROUP_N
    place, zeros_place = rows_of_scales * scales_n, rows_of_scales * zeros_n
    first_step = tl.minimum(begin, steps - 1)  # a program may have none
    group = first_step // STEPS
    minus = tl.full([BN], _minus_centre(dtype), tl.int32)
    scale = minus
    if ONE_GROUP:
        taken, factor, shift = _scaling_at(
            scales, zeros, place, zeros_place, first_step * BK, K, scales_k, zeros_k,
            CODE, LAYOUT, GROUP_K, BN, BK, MASKED, dtype,
        )  # fmt: skip
    elif not SCALED:
        scale = scale_at(scales, nested, place + group * scales_k)
        if INTEGERS:
            minus = _minus_at(zeros + zeros_place + group * zeros_k, CODE, dtype)
    sums = tl.zeros([BN, ROWS], tl.float32)
    for step in tl.range(begin, end, num_stages=STAGES):
        k = step * BK
        # What the next block is scaled with is on its way while this one is multiplied.
        if ONE_GROUP:
            next_taken, next_factor, next_shift = _scaling_at(
                scales, zeros, place, zeros_place, tl.minimum(step + 1, end - 1) * BK, K, scales_k, zeros_k,
                CODE, LAYOUT, GROUP_K, BN, BK, MASKED, dtype,
            )  # fmt: skip
        elif SUMS_SCALED:
            next_group = tl.minimum(step + 1, end - 1) // STEPS
            next_scale = scale_at(scales, nested, place + next_group * scales_k)
            if INTEGERS:
                next_minus = _minus_at(zeros + zeros_place + next_group * zeros_k, CODE, dtype)
        # Triton loads scales of several groups ahead as it does codes; if the loop carried them, numbers would go
        # through shared memory.
        if NF4:
            high, low = nf4_scales_at(scales, nested, place, k, K, scales_k, GROUP_K, BK, MASKED, dtype)
            both = codes.load([own, k // 2])
            weights = nf4_to_numbers(both, high, low, BN, BK, LAYOUT == "high_first", ASM, dtype)
        elif SCALED:
            if not ONE_GROUP:
                taken, factor, shift = _scaling_at(
                    scales, zeros, place, zeros_place, k, K, scales_k, zeros_k,
                    CODE, LAYOUT, GROUP_K, BN, BK, MASKED, dtype,
                )  # fmt: skip
            weights = _weights(codes, own, k, taken, factor, shift, CODE, LAYOUT, BN, BK, ASM, True, dtype)  # pyright: ignore[reportPossiblyUnboundVariable]
        else:
            less = minus[:, None]
            weights = _weights(codes, own, k, less, less, less, CODE, LAYOUT, BN, BK, ASM, False, dtype)
        rows = _rows_at(x, first_row, after_waiting(k) if PDL else k, ROWS, BK)
        if SUMS_SCALED:
            sums += tl.dot(weights, rows.T) * (scale if ALIKE else scale[:, None])
        else:
            sums = ended(tl.dot(weights, rows.T, sums))
        if ONE_GROUP:
            taken, factor, shift = next_taken, next_factor, next_shift  # pyright: ignore[reportPossiblyUnboundVariable]
        elif SUMS_SCALED:
            scale = next_scale  # pyright: ignore[reportPossiblyUnboundVariable]
            if INTEGERS:
                minus = next_minus  # pyright: ignore[reportPossiblyUnboundVariable]
    if GROUP_K == 0 and not SCALED:
        sums = sums * (scale if ALIKE else scale[:, None])
    offs_m = first_row + tl.arange(0, ROWS)
    if len(x.block_shape) == 3:  # the second half of a tile are the last rows
        offs_m -= tl.where(tl.arange(0, ROWS) < ROWS // 2, 0, ROWS - M)
    outputs += first - own
    finish_tile(y, bias, sums, parts, counters, tile, part, outputs, offs_m, M, N, splits, ROWS, BN, SPLIT, PDL)


def multiply(
    rows: Tensor, weight: PackedWeight, bias: Tensor | None, tiling: PackedLinearTiling, *, pdl: bool
) -> Tensor:
    """Return ``rows @ weight.T + bias``; rows ``[M, K]`` are contiguous; ``can_be_joined`` says what it takes."""
    return multiply_together(rows, [weight], bias, tiling, pdl=pdl)


def multiply_together(
    rows: Tensor, weights: Sequence[PackedWeight], bias: Tensor | None, tiling: PackedLinearTiling, *, pdl: bool
) -> Tensor:
    """Return the products of rows with weights, one after the other, ``[M, N]``; ``can_be_together`` says of which."""
    format, _, scales, zeros, (_, k), nested = weights[0]
    n = sum(weight.shape[0] for weight in weights)
    rows = rows.clone() if rows.data_ptr() % 16 else rows  # TMA reads from multiples of 16 bytes
    m, y = rows.shape[0], rows.new_empty(rows.shape[0], n)
    tiles = -(-m // tiling.rows), -(-n // tiling.outputs)
    parts, counters = parts_of(tiles[0] * tiles[1], tiling, rows.device)
    scaled = has_scaled_numbers(weights[0], tiling.inputs)
    first, *others = (_codes_of(weight, tiling) for weight in weights)
    grid = (*tiles, tiling.splits)
    _packed_joined[grid](
        _blocks_of(rows, tiling), first,
        scales, zeros, nested, bias, y, parts, counters,
        m, n, k, *scales.stride(), *(zeros.stride() if zeros is not None else (0, 0)), tiling.splits,
        *_others(weights, others),
        CODE=format.code, LAYOUT=format.layout, GROUP_N=format.outputs, GROUP_K=format.inputs, ROWS=tiling.rows,
        BN=tiling.outputs, BK=tiling.inputs, STAGES=tiling.stages, SPLIT=tiling.splits > 1, SCALED=scaled,
        MASKED=k % tiling.inputs > 0,
        ASM=pair_text_for(format.code, format.layout, rows.dtype, scaled=scaled), PDL=pdl, **options(tiling.warps, pdl),
    )  # fmt: skip
    return y


def _others(weights: Sequence[PackedWeight], codes: Sequence[TensorDescriptor]) -> list[Any]:
    """Return the kernel's arguments for all weights but the first, and None for those that there are not."""
    given, begin = list[Any](), 0
    for before, weight, own in zip(weights, weights[1:], codes, strict=False):
        begin += before.shape[0]
        strides = weight.scales.stride(1), 0 if weight.zeros is None else weight.zeros.stride(1)
        given += [own, weight.scales, weight.zeros, weight.nested, *strides, begin]
    return given + [None] * (7 * (MOST_TOGETHER - len(weights)))


def _blocks_of(rows: Tensor, tiling: PackedLinearTiling) -> TensorDescriptor:
    """Return a descriptor of rows, of which a program loads a block at a time.

    Rows that fill more than half of one tile, and not all of it, are loaded as the first and the last ROWS / 2.
    """
    (m, k), half = rows.shape, tiling.rows // 2
    if tiling.rows < FEWEST_HALVED or not half < m < tiling.rows:
        return TensorDescriptor.from_tensor(rows, [tiling.rows, tiling.inputs])
    return TensorDescriptor(rows, [2, half, k], [(m - half) * k, k, 1], [2, half, tiling.inputs])


def _codes_of(weight: PackedWeight, tiling: PackedLinearTiling) -> TensorDescriptor:
    """Return the codes as a matrix, of which a program multiplies a part at a time."""
    format, codes, outputs, inputs = weight.format, weight.codes, tiling.outputs, tiling.inputs
    if format.layout == "tiles":
        return TensorDescriptor.from_tensor(codes.flatten(1), [outputs // TILE_OUTPUTS, inputs])
    if format.layout == "words_by_input":
        return TensorDescriptor.from_tensor(codes, [inputs // 8, outputs])
    if format.layout == "words_by_output":
        return TensorDescriptor.from_tensor(codes, [inputs, outputs // 8])
    return TensorDescriptor.from_tensor(codes.view(torch.uint8), [outputs, inputs * format.bits // 8])
