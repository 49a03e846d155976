"""Triton kernels for latent attention in decode: one query a row and head, without a plan."""

# As in ``kernels.attention.decode``, the programs of a tile of rows share its keys by the current page table. Here all
# heads read the same latents, so a tile of heads takes the place of a kv head, and what a program finds is large: so
# many heads times R sums. A second kernel merges what several programs have found, in as many programs as the device
# has work for. Each tile of heads writes the row's newest latent before it reads it: they write the same.
# Shapes: B rows, H query heads, M query heads of a program, R latent size, E size of the rotated part, P pages, S page
# size.

# Kernels are Triton's objects, not the functions that a type checker sees.
# pyright: reportIndexIssue=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_llm_ops.contracts.latent import LatentDecode
from compiled_llm_ops.kernels.attention.decode import _pick, _share
from compiled_llm_ops.kernels.attention.decode_tiling import MAX_ROWS
from compiled_llm_ops.kernels.latent.latent_tiling import MOST_SHARES, LatentTiling
from compiled_llm_ops.kernels.latent.step import (
    attend_block,
    attend_keys_first,
    check_kernel,
    inner_contiguous,
    least_share,
    load_block,
    load_chosen,
    load_whole_pages,
)
from compiled_llm_ops.kernels.logits import base_of

MERGE_STAGES = 3  # of the pipeline that merges: partial results are loaded while others are summed


@triton.jit
def _store_nothing(out, lse, row, head, heads, TILE: tl.constexpr, RANK: tl.constexpr):
    """Write the results of a row that has no keys."""
    offs_h, offs_r = head + tl.arange(0, TILE), tl.arange(0, RANK)
    mask = offs_h < heads
    item = row.to(tl.int64) * heads + offs_h
    zeros = tl.zeros([TILE, RANK], out.dtype.element_ty)
    tl.store(out + item[:, None] * RANK + offs_r[None, :], zeros, mask=mask[:, None])
    if lse is not None:
        tl.store(lse + item, tl.full([TILE], -float("inf"), tl.float32), mask=mask)


@triton.jit(do_not_specialize=["rows", "row_tile", "heads", "min_share", "few", "equal", "listed"])
def _latent_decode(
    query_latent, query_rope, latent, rope, pages, starts, lengths, indices,
    out, lse, partials, partial_lses, shares,
    row_stride, head_stride, rope_row_stride, rope_head_stride, latent_stride, key_rope_stride,
    rows, row_tile, heads, min_share, few, equal, scale, chosen, listed,
    ROWS: tl.constexpr, MOST: tl.constexpr, TILE: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, KEYS_FIRST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Attend over some keys of one row with a tile of heads; if several programs share them, another kernel merges."""
    # Axes of the grid: tiles of heads, tiles of rows, programs, so that programs without keys start last. A tile of
    # rows is ``row_tile`` rows, at most ROWS. ``partials`` holds a [M, R] for each program and ``partial_lses`` a [M];
    # of each row ``shares`` ``[B, 2]`` takes the first program and how many there are. All three are None if each has
    # one.
    head_tile, tile, program = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    head_tiles, programs = tl.num_programs(0), tl.num_programs(2)
    offs_g, offs_n = tl.arange(0, TILE), tl.arange(0, BLOCK)
    offs_r, offs_e = tl.arange(0, RANK), tl.arange(0, ROPE)
    head = head_tile * TILE
    row_ids = tile * row_tile + tl.arange(0, ROWS)
    mask = (tl.arange(0, ROWS) < row_tile) & (row_ids < rows)
    first_pages = tl.load(starts + row_ids, mask=mask, other=0)
    ends = tl.load(lengths + row_ids, mask=mask, other=0)  # no row: no keys
    blocks = tl.cdiv(ends, BLOCK)
    if chosen is not None:  # of the list
        blocks = tl.where(ends > 0, tl.cdiv(listed, BLOCK), 0)
    least = least_share(blocks, row_tile, min_share, few, equal)
    own, first_program, count, begin, end = _share(blocks, program, programs, row_tile, least, least, MOST)
    # The first programs answer for rows without keys: there is one for each row at least.
    unseen = mask & (tl.arange(0, ROWS) == program) & (ends == 0)
    if tl.sum(unseen.to(tl.int32)) > 0:
        if PDL:
            gdc_wait()
        _store_nothing(out, lse, tile * row_tile + program, head, heads, TILE, RANK)
        if shares is not None:
            tl.store(shares + 2 * (tile * row_tile + program) + 1, 0)
    if count > 0:
        row, length = _pick(own, row_ids), _pick(own, ends)
        own_indices = indices + _pick(own, first_pages)
        newest = length - 1
        page = tl.load(own_indices + newest // PAGE).to(tl.int64)
        slot = pages + (page * PAGE + newest % PAGE) * (RANK + ROPE)
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        offs_h = head + offs_g
        q_ptrs = query_latent + row.to(tl.int64) * row_stride + offs_h[:, None] * head_stride + offs_r[None, :]
        q = tl.load(q_ptrs, mask=(offs_h < heads)[:, None], other=0.0)
        rope_ptrs = query_rope + row.to(tl.int64) * rope_row_stride + offs_h[:, None] * rope_head_stride
        q_rope = tl.load(rope_ptrs + offs_e[None, :], mask=(offs_h < heads)[:, None], other=0.0)
        writes = end * BLOCK >= length
        if chosen is not None:  # any program may read the newest, so each writes it
            writes = begin < end
        if writes:
            tl.store(slot + offs_r, tl.load(latent + row.to(tl.int64) * latent_stride + offs_r))
            tl.store(slot + RANK + offs_e, tl.load(rope + row.to(tl.int64) * key_rope_stride + offs_e))
            tl.debug_barrier()  # written before any thread of the program reads it
        largest = tl.full([TILE], -float("inf"), tl.float32)
        if KEYS_FIRST:
            total = tl.zeros([BLOCK, TILE], tl.float32)
            acc = tl.zeros([RANK, TILE], tl.float32)
        else:
            total = tl.zeros([TILE], tl.float32)
            acc = tl.zeros([TILE, RANK], tl.float32)
        WHOLE: tl.constexpr = BLOCK % PAGE == 0 and chosen is None
        for block in tl.range(begin, end, num_stages=STAGES):
            if WHOLE:
                latents, turned, seen = load_whole_pages(pages, own_indices, block, length, RANK, ROPE, PAGE, BLOCK)
            else:
                position = block * BLOCK + offs_n
                if chosen is None:
                    seen = position < length
                else:
                    own_list = chosen + row.to(tl.int64) * listed
                    position, seen = load_chosen(own_list, position, listed, length)
                latents, turned = load_block(pages, own_indices, position, seen, RANK, ROPE, PAGE)
            if KEYS_FIRST:
                largest, total, acc = attend_keys_first(
                    q, q_rope, latents, turned, seen, scale, largest, total, acc, chosen is not None
                )
            else:
                largest, total, acc = attend_block(
                    q, q_rope, latents, turned, seen[None, :], scale, largest, total, acc
                )
        if KEYS_FIRST:
            total = tl.sum(total, 0)
        if chosen is not None:
            total = tl.where(total == 0.0, 1.0, total)
        lses = largest + tl.log2(total)
        if KEYS_FIRST:
            values, keep = acc / total[None, :], (offs_h < heads)[None, :]
            offs_v = offs_g[None, :] * RANK + offs_r[:, None]
        else:
            values, keep = acc / total[:, None], (offs_h < heads)[:, None]
            offs_v = offs_g[:, None] * RANK + offs_r[None, :]
        if shares is not None:
            tl.store(shares + 2 * row, first_program)
            tl.store(shares + 2 * row + 1, count)
        if count == 1:
            own_item = row.to(tl.int64) * heads + head
            tl.store(out + own_item * RANK + offs_v, values.to(out.dtype.element_ty), mask=keep)
            if lse is not None:
                tl.store(lse + own_item + offs_g, lses, mask=offs_h < heads)
        elif shares is not None:
            own_partial = ((tile * head_tiles + head_tile) * programs + program).to(tl.int64) * TILE
            tl.store(partials + own_partial * RANK + offs_v, values, mask=keep)
            tl.store(partial_lses + own_partial + offs_g, lses)


@triton.jit(do_not_specialize=["row_tile", "head_tiles", "programs"])
def _merge_shares(
    partials, partial_lses, shares, out, lse, row_tile, head_tiles, programs,
    TILE: tl.constexpr, RANK: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    BLIND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merge what the programs of a row have found for one head, COLUMNS of its R numbers, always in the same order."""
    # Axes of the grid: rows, heads, parts of the columns. If BLIND, a query may have seen no key.
    row, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    # Loads that do not wait for each other begin together: each takes as long as all else that a program does.
    first_program, count = tl.load(shares + 2 * row), tl.load(shares + 2 * row + 1)
    if count > 1:
        first = ((row // row_tile) * head_tiles + head // TILE) * programs + first_program
        own_lses = partial_lses + first.to(tl.int64) * TILE + head % TILE
        own_values = partials + (first.to(tl.int64) * TILE + head % TILE) * RANK + part * COLUMNS
        offs_p, offs_c = tl.arange(0, CHUNK), tl.arange(0, COLUMNS)
        largest, total = -float("inf"), 0.0
        acc = tl.zeros([CHUNK, COLUMNS], tl.float32)
        for start in tl.range(0, count, CHUNK, num_stages=STAGES):
            partial = start + offs_p
            used = partial < count
            lses = tl.load(own_lses + partial * TILE, mask=used, other=-float("inf"))
            part_ptrs = own_values + partial[:, None].to(tl.int64) * (TILE * RANK) + offs_c[None, :]
            values = tl.load(part_ptrs, mask=used[:, None], other=0.0)
            larger = tl.maximum(largest, tl.max(lses))
            base = base_of(larger, BLIND)
            weights, fade = tl.exp2(lses - base), tl.exp2(largest - base)
            acc = acc * fade + weights[:, None] * values
            total = total * fade + tl.sum(weights)
            largest = larger
        lses = largest + tl.log2(total)
        if BLIND:
            total = tl.where(total == 0.0, 1.0, total)
        item = row.to(tl.int64) * heads + head
        merged = tl.sum(acc, 0) / total
        tl.store(out + item * RANK + part * COLUMNS + offs_c, merged.to(out.dtype.element_ty))
        if lse is not None:  # noqa: SIM102  known when the kernel is compiled
            if part == 0:
                tl.store(lse + item, lses)


def decode(args: LatentDecode, lse: Tensor | None, *, tiling: LatentTiling, pdl: bool) -> Tensor:
    """Launch attention of one new token a row, ``[B, H, R]``, and ``lse`` ``[B, H]`` float32, in base 2, if any."""
    # Where programs share keys, what merges them is launched, too. ValueError if there is no kernel for these sizes or
    # dtypes, or the pages are not contiguous.
    check_kernel("latent_decode", args)
    query, query_rope, latent, rope = map(inner_contiguous, args[:4])
    (rows, heads, rank), size, page_size = query.shape, query_rope.shape[2], args.pages.shape[1]
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if not out.numel():
        return out
    chosen = None if args.chosen is None else args.chosen.contiguous()
    head_tiles, row_tiles = -(-heads // tiling.heads), -(-rows // tiling.row_tile)
    partials, partial_lses, shares = None, None, None
    if tiling.programs > 1:
        found = head_tiles * tiling.programs * row_tiles * tiling.heads
        partials = torch.empty((found, rank), dtype=torch.float32, device=query.device)
        partial_lses = torch.empty(found, dtype=torch.float32, device=query.device)
        shares = torch.empty((rows, 2), dtype=torch.int32, device=query.device)
    overlap: dict[str, Any] = {"PDL": pdl, **({"launch_pdl": True} if pdl else {})}
    given = (query, query_rope, latent, rope, args.pages, args.starts, args.lengths, args.indices)
    made = (out, lse, partials, partial_lses, shares)
    strides = (*query.stride()[:2], *query_rope.stride()[:2], latent.stride(0), rope.stride(0))
    numbers = (rows, tiling.row_tile, heads, tiling.min_share, tiling.few, tiling.equal)
    kernel, own = _kernel_of(tiling, chosen)
    kernel[(head_tiles, row_tiles, tiling.programs)](
        *given, *made, *strides, *numbers, args.scale * math.log2(math.e), **own,
        ROWS=1 if tiling.row_tile == 1 else MAX_ROWS, MOST=MOST_SHARES, TILE=tiling.heads, RANK=rank, ROPE=size,
        PAGE=page_size, BLOCK=tiling.block, KEYS_FIRST=tiling.keys_first, num_warps=tiling.warps, **overlap,
    )  # fmt: skip
    if shares is not None:
        _merge_shares[(rows, heads, rank // tiling.merged)](
            partials, partial_lses, shares, out, lse, tiling.row_tile, head_tiles, tiling.programs, TILE=tiling.heads,
            RANK=rank, CHUNK=tiling.merged_parts, COLUMNS=tiling.merged, STAGES=MERGE_STAGES, BLIND=chosen is not None,
            num_warps=4, **overlap,
        )  # fmt: skip
    return out


def _kernel_of(tiling: LatentTiling, chosen: Tensor | None) -> tuple[Any, dict[str, Any]]:
    """Return the kernel of a tiling, and its arguments for chosen tokens and the pipeline."""
    lists = {"chosen": chosen, "listed": 0 if chosen is None else chosen.shape[1]}
    if not tiling.by_hand:
        return _latent_decode, {**lists, "STAGES": tiling.stages}
    from compiled_llm_ops.kernels.latent.hopper import _latent_decode_hopper

    return _latent_decode_hopper, lists
