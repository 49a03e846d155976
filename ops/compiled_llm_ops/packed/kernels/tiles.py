"""A matmul with a packed weight on tensor cores, whose inputs may be split among programs."""

# A weight is the first operand, which tensor cores take from registers, where codes become numbers; rows are the
# second. A sum over inputs has no order of its own: the codes of a byte's halves, or of a word's eight places, can be
# operands of their own, each with the rows' inputs of those places, or are joined in the order of the inputs.
# Shapes: M rows, N outputs, K inputs.

# Kernels are Triton's objects, not the functions that a type checker sees.
# mypy: disable-error-code="assignment, var-annotated"
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from compiled_llm_ops.kernels.counters import zeroed_counters
from compiled_llm_ops.kernels.linear.skinny import after_waiting
from compiled_llm_ops.packed.formats import PackedWeight
from compiled_llm_ops.packed.kernels.codes import halves_at, planes_at, scale_at, shift_at, weights_at
from compiled_llm_ops.packed.kernels.ptx import interprets, text_for
from compiled_llm_ops.packed.tilings import PackedLinearTiling, RoundedTiling, way_of

_COMPILED: tl.constexpr = tl.constexpr(not interprets())


@triton.jit
def _halves(rows, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Split ``[ROWS, COLUMNS]`` into its even and its odd columns."""
    return tl.split(tl.reshape(rows, [ROWS, COLUMNS // 2, 2]))


@triton.jit
def _planes(rows, TILES: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr):
    """Split rows ``[ROWS, BK]`` into inputs of a word's eight places, each ``[ROWS, BK / 8]`` in the words' order."""
    if TILES:
        # k = 32 piece + 8 eighth + 2 column + neighbour; a word is at 4 column + piece, a place 4 neighbour + eighth
        parted = tl.reshape(rows, [ROWS, BK // 128, 4, 4, 4, 2])
        rows = tl.reshape(tl.permute(parted, [0, 1, 4, 2, 5, 3]), [ROWS, BK])
    even, odd = _halves(rows, ROWS, BK)
    p04, p26 = _halves(even, ROWS, BK // 2)
    p15, p37 = _halves(odd, ROWS, BK // 2)
    p0, p4 = _halves(p04, ROWS, BK // 4)
    p2, p6 = _halves(p26, ROWS, BK // 4)
    p1, p5 = _halves(p15, ROWS, BK // 4)
    p3, p7 = _halves(p37, ROWS, BK // 4)
    return p0, p1, p2, p3, p4, p5, p6, p7


@triton.jit
def _rows(at, offs_m, M, offs_k, K, MASKED: tl.constexpr):
    """Return rows ``[ROWS, BK]``, zeros for those of padding: all programs would read one row over and over."""
    mask = (offs_m < M)[:, None]
    if MASKED:
        mask = mask & (offs_k < K)[None, :]
    return tl.load(at, mask=mask, other=0.0)


@triton.jit
def _product(
    sums, x, codes, first, offs_m, k, M, N, K, blocks,
    CODE: tl.constexpr, LAYOUT: tl.constexpr, WAY: tl.constexpr, APART: tl.constexpr, ROWS: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, MASKED: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Return ``sums`` ``[BN, ROWS]`` and the product of codes and rows over BK inputs, and the rows ``[ROWS, BK]``."""
    dtype: tl.constexpr = x.dtype.element_ty
    offs_k = tl.arange(0, BK)
    first_k = after_waiting(k // BK) * BK if PDL else k  # a multiple of BK, as Triton sees
    at = x + offs_m[:, None] * K + first_k + offs_k[None, :]
    if APART and WAY == "halves":
        even, odd = halves_at(codes, first, N, k, K, blocks, CODE, LAYOUT, BN, BK, MASKED, ASM, dtype)
        rows = _rows(at, offs_m, M, k + offs_k, K, MASKED)
        even_rows, odd_rows = _halves(rows, ROWS, BK)
        sums = tl.dot(odd, odd_rows.T, tl.dot(even, even_rows.T, sums))
    elif APART and WAY == "planes":
        planes = planes_at(codes, first, N, k, K, blocks, CODE, LAYOUT, BN, BK, MASKED, ASM, dtype)
        rows = _rows(at, offs_m, M, k + offs_k, K, MASKED)
        of_planes = _planes(rows, LAYOUT == "tiles", ROWS, BK)
        for plane in tl.static_range(8):
            sums = tl.dot(planes[plane], of_planes[plane].T, sums)
    else:
        weights = weights_at(codes, first, N, k, K, blocks, CODE, LAYOUT, WAY, BN, BK, MASKED, ASM, dtype)
        rows = _rows(at, offs_m, M, k + offs_k, K, MASKED)
        sums = tl.dot(weights, rows.T, sums)
    return sums, rows


@triton.jit
def ended(sums):
    """Return sums that tensor cores have ended, whose registers of codes may be written from then on."""
    # Tensor cores read these registers while a program goes on. Of sums that only the next block's product reads,
    # Triton 3.6 waits for all but the last seven instructions, and writes the next block's codes into registers that
    # those may still read. What reads the sums in each turn, and be it nothing but a copy, has it wait for all.
    if _COMPILED:
        sums = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [sums], dtype=tl.float32, is_pure=True, pack=1)
    return sums


@triton.jit
def sum_parts(parts, splits, stride):
    """Return the sum of what programs have computed of a tile, in the order of their inputs."""
    total = tl.load(parts)
    for part in tl.range(1, splits):
        total += tl.load(parts + part * stride)
    return total


@triton.jit(do_not_specialize=["M", "splits"])  # Triton would compile again for 1 and for multiples of 16
def _packed_tensor_cores(
    x, codes, scales, zeros, nested, bias, y, parts, counters,
    M, N, K, blocks, scales_n, scales_k, zeros_n, zeros_k, splits,
    CODE: tl.constexpr, LAYOUT: tl.constexpr, WAY: tl.constexpr, APART: tl.constexpr, GROUP_N: tl.constexpr,
    GROUP_K: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    SPLIT: tl.constexpr, MASKED: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute BN outputs of ROWS rows over a part of the inputs; the last program of a tile sums all parts."""
    tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    first_row, first, part = tl.program_id(0) * ROWS, tl.program_id(1) * BN, tl.program_id(2)
    offs_n = tl.minimum(first + tl.arange(0, BN), N - 1)
    offs_m = first_row + tl.arange(0, ROWS)
    steps = tl.cdiv(K, BK)
    each = tl.cdiv(steps, splits)
    begin = part * each
    end = tl.minimum(begin + each, steps)
    # One scale for all outputs of the tile, or one for each
    if GROUP_N == 0:
        rows_of_scales = first * 0
    elif GROUP_N % BN == 0:
        rows_of_scales = first // GROUP_N
    else:
        rows_of_scales = offs_n // GROUP_N
    ALIKE: tl.constexpr = GROUP_N % BN == 0
    STEPS: tl.constexpr = 1 << 30 if GROUP_K == 0 else GROUP_K // BK
    sums = tl.zeros([BN, ROWS], tl.float32)
    row_sums = tl.zeros([ROWS], tl.float32)
    place = rows_of_scales * scales_n
    first_step = tl.minimum(begin, steps - 1)  # a program may have none
    scale = scale_at(scales, nested, place + first_step // STEPS * scales_k)
    for step in tl.range(begin, end, num_stages=STAGES):
        k = step * BK
        if GROUP_K == 0:
            sums, rows = _product(
                sums, x, codes, first, offs_m, k, M, N, K, blocks,
                CODE, LAYOUT, WAY, APART, ROWS, BN, BK, MASKED, ASM, PDL,
            )  # fmt: skip
            sums = ended(sums)
            if zeros is not None:
                row_sums += tl.sum(rows.to(tl.float32), 1)
        else:
            # The next scale is on its way while this block is multiplied.
            following = tl.minimum(step + 1, end - 1) // STEPS
            next_scale = scale_at(scales, nested, place + following * scales_k)
            if zeros is not None:
                shift = shift_at(zeros, rows_of_scales * zeros_n + (step // STEPS) * zeros_k, scale, CODE)
            product, rows = _product(
                tl.zeros([BN, ROWS], tl.float32), x, codes, first, offs_m, k, M, N, K, blocks,
                CODE, LAYOUT, WAY, APART, ROWS, BN, BK, MASKED, ASM, PDL,
            )  # fmt: skip
            sums += product * (scale if ALIKE else scale[:, None])
            if zeros is not None:
                of_rows = tl.sum(rows.to(tl.float32), 1)[None, :]
                sums += of_rows * (shift if ALIKE else shift[:, None])  # pyright: ignore[reportPossiblyUnboundVariable]
            scale = next_scale
    if GROUP_K == 0:
        if zeros is not None:
            shift = shift_at(zeros, rows_of_scales * zeros_n, scale, CODE)
        sums = sums * (scale if ALIKE else scale[:, None])
        if zeros is not None:
            sums += row_sums[None, :] * (shift if ALIKE else shift[:, None])  # pyright: ignore[reportPossiblyUnboundVariable]
    offs_n = first + tl.arange(0, BN)
    offs_m = first_row + tl.arange(0, ROWS)
    finish_tile(y, bias, sums, parts, counters, tile, part, offs_n, offs_m, M, N, splits, ROWS, BN, SPLIT, PDL)


@triton.jit
def finish_tile(
    y, bias, sums, parts, counters, tile, part, offs_n, offs_m, M, N, splits,
    ROWS: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store a tile, or a part of its sums; the last program of a tile sums all parts and stores it."""
    if PDL:
        gdc_wait()  # a program without a step has not waited
    if SPLIT:
        inside = tl.arange(0, BN)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        tiles = tl.num_programs(0) * tl.num_programs(1)
        tl.store(parts + (part * tiles + tile) * (BN * ROWS) + inside, sums)
        tl.debug_barrier()  # every thread's part is written before one of them says so
        if tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu") == splits - 1:
            tl.debug_barrier()
            total = sum_parts(parts + tile * (BN * ROWS) + inside, splits, tiles * (BN * ROWS))
            _store_outputs(y, bias, total, offs_n, offs_m, M, N)
            tl.store(counters + tile, 0)
    else:
        _store_outputs(y, bias, sums, offs_n, offs_m, M, N)


@triton.jit
def _store_outputs(y, bias, sums, offs_n, offs_m, M, N):
    if bias is not None:
        sums += tl.load(bias + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[:, None]
    mask = (offs_m < M)[None, :] & (offs_n < N)[:, None]
    tl.store(y + offs_m[None, :] * N + offs_n[:, None], sums.to(y.dtype.element_ty), mask=mask)


def as_bytes(weight: PackedWeight) -> Tensor:
    """Return the codes as kernels read them: bytes without a sign, numbers in e4m3, or words."""
    codes = weight.codes
    return codes.view(torch.uint8) if codes.dtype is torch.int8 else codes


def multiply(
    rows: Tensor, weight: PackedWeight, bias: Tensor | None, tiling: PackedLinearTiling, *, pdl: bool
) -> Tensor:
    """Return ``rows @ weight.T + bias``; rows ``[M, K]`` are contiguous, float16 or bfloat16."""
    format, _, scales, zeros, (n, k), nested = weight
    codes, m = as_bytes(weight), rows.shape[0]
    tiles = -(-m // tiling.rows), -(-n // tiling.outputs)
    y = rows.new_empty(m, n)
    parts, counters = parts_of(tiles[0] * tiles[1], tiling, rows.device)
    way = way_of(format, tiling.inputs)
    grid = (*tiles, tiling.splits)
    _packed_tensor_cores[grid](
        rows, codes, scales, zeros, nested, bias, y, parts, counters,
        m, n, k, codes.shape[1], *scales.stride(), *(zeros.stride() if zeros is not None else (0, 0)),
        tiling.splits, CODE=format.code, LAYOUT=format.layout, WAY=way, APART=tiling.apart,
        GROUP_N=format.outputs, GROUP_K=format.inputs, ROWS=tiling.rows, BN=tiling.outputs, BK=tiling.inputs,
        STAGES=tiling.stages, SPLIT=tiling.splits > 1, MASKED=k % tiling.inputs > 0,
        ASM="" if way == "gathered" else text_for(format.code, format.layout, rows.dtype),
        PDL=pdl, **options(tiling.warps, pdl),
    )  # fmt: skip
    return y


def parts_of(
    tiles: int, tiling: PackedLinearTiling | RoundedTiling, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Return memory for the sums of so many tiles' parts, and the tiles' counters; None if one program has a tile."""
    if tiling.splits == 1:
        return None, None
    parts = torch.empty(tiling.splits * tiles * tiling.rows * tiling.outputs, dtype=torch.float32, device=device)
    return parts, zeroed_counters.take(tiles, device)


def options(warps: int, pdl: bool) -> dict[str, Any]:
    """Return what a launch of so many warps is given."""
    return {"num_warps": warps, **({"launch_pdl": True} if pdl else {})}
