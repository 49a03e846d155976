"""A Triton kernel for latent attention in decode: one query a row and head, in one launch and without a plan.

As in ``kernels.attention.decode``, the programs of a tile of rows share its keys by the current page table, and the
last one to end merges what those of a row have found. Here all heads read the same latents, so a tile of heads takes
the place of a kv head. Each of them writes the row's newest latent before it reads it: they write the same.

Shapes: B rows, H query heads, M query heads of a program, R latent size, E size of the rotated part, P pages, S page
size.
"""

# Kernels are Triton's objects, not the functions that a type checker sees.
# pyright: reportIndexIssue=false

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_llm_ops.contracts import LatentDecode
from compiled_llm_ops.kernels.attention.decode import _merge, _pick, _share, _unsplit
from compiled_llm_ops.kernels.attention.decode_tiling import MAX_ROWS, MAX_SHARES, AttentionTiling
from compiled_llm_ops.kernels.counters import zeroed_counters
from compiled_llm_ops.kernels.latent.latent_tiling import query_tile
from compiled_llm_ops.kernels.latent.step import (
    attend_block,
    check_kernel,
    inner_contiguous,
    load_block,
    load_chosen,
)

MERGED_VALUES = 2**12
"""Values of partial results that are summed at a time."""

MERGED_COLUMNS = 32
"""Columns of R that are merged at a time."""


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


@triton.jit(do_not_specialize=["rows", "row_tile", "heads", "unsplit", "min_share", "listed"])
def _latent_decode(
    query_latent, query_rope, latent, rope, pages, starts, lengths, indices, chosen,
    out, lse, partials, partial_lses, arrivals,
    row_stride, head_stride, rope_row_stride, rope_head_stride, latent_stride, key_rope_stride,
    rows, row_tile, heads, unsplit, min_share, listed, scale,
    ROWS: tl.constexpr, MOST: tl.constexpr, TILE: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr,
    SHARE_EQUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attend over some keys of one row with a tile of heads; if several programs share them, the last merges all.

    Axes of the grid: tiles of heads, tiles of rows, programs, so that programs without keys start last. A tile of rows
    is ``row_tile`` rows, at most ROWS. ``partials`` holds a [M, R] for each program and ``partial_lses`` a [M];
    ``arrivals`` holds a zero for each row and tile of heads, which it is again afterwards.
    """
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
    unsplit = _unsplit(blocks, row_tile, unsplit, SHARE_EQUAL)
    own, first_program, count, begin, end = _share(blocks, program, programs, row_tile, unsplit, min_share, MOST)
    # The first programs answer for rows without keys: there is one for each row at least.
    unseen = mask & (tl.arange(0, ROWS) == program) & (ends == 0)
    if tl.sum(unseen.to(tl.int32)) > 0:
        if PDL:
            gdc_wait()
        _store_nothing(out, lse, tile * row_tile + program, head, heads, TILE, RANK)
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
        total = tl.zeros([TILE], tl.float32)
        acc = tl.zeros([TILE, RANK], tl.float32)
        for block in tl.range(begin, end, num_stages=STAGES):
            position = block * BLOCK + offs_n
            if chosen is None:
                seen = position < length
            else:
                own_list = chosen + row.to(tl.int64) * listed
                position, seen = load_chosen(own_list, position, listed, length)
            latents, turned = load_block(pages, own_indices, position, seen, RANK, ROPE, PAGE)
            largest, total, acc = attend_block(q, q_rope, latents, turned, seen[None, :], scale, largest, total, acc)
        if chosen is not None:
            total = tl.where(total == 0.0, 1.0, total)
        values, lses = acc / total[:, None], largest + tl.log2(total)
        item = row * head_tiles + head_tile
        keep = offs_h < heads
        own_item = row.to(tl.int64) * heads + head
        own_out = out + own_item * RANK + offs_g[:, None] * RANK
        if count == 1:
            tl.store(own_out + offs_r[None, :], values.to(out.dtype.element_ty), mask=keep[:, None])
            if lse is not None:
                tl.store(lse + own_item + offs_g, lses, mask=keep)
        else:
            first_partial = (tile * head_tiles + head_tile) * programs
            own_partial = (first_partial + program).to(tl.int64) * TILE
            own_values = partials + own_partial * RANK + (offs_g[:, None] * RANK + offs_r[None, :])
            tl.store(own_values, values, cache_modifier=".cg")
            tl.store(partial_lses + own_partial + offs_g, lses, cache_modifier=".cg")
            tl.debug_barrier()  # every thread's part is written before one of them says so
            if tl.atomic_add(arrivals + item, 1, sem="acq_rel", scope="gpu") == count - 1:
                for column in tl.range(0, RANK, COLUMNS):
                    merged, merged_lses = _merge(
                        partials + column, partial_lses, first_partial + first_program, count, chosen is not None, TILE,
                        COLUMNS, CHUNK, RANK,
                    )  # fmt: skip
                    if chosen is not None:
                        merged = tl.where((merged_lses == -float("inf"))[:, None], 0.0, merged)
                    out_ptrs = own_out + column + tl.arange(0, COLUMNS)[None, :]
                    tl.store(out_ptrs, merged.to(out.dtype.element_ty), mask=keep[:, None])
                    if lse is not None:
                        tl.store(lse + own_item + offs_g, merged_lses, mask=keep)
                tl.store(arrivals + item, 0)


def decode(args: LatentDecode, lse: Tensor | None, *, tiling: AttentionTiling, pdl: bool) -> Tensor:
    """Launch attention of one new token a row, on the current device.

    Args:
        args: of ``latent_decode``, checked.
        lse: ``[B, H]`` float32, contiguous, written: the log-sum-exp in base 2. None to skip it.
        tiling: how programs share keys.
        pdl: begin before the previous kernel has ended; needs compute capability 9.0.

    Returns:
        ``[B, H, R]``, contiguous.

    Raises:
        ValueError: there is no kernel for these sizes or dtypes, or the pages are not contiguous.

    Source:
        Flash-Decoding (https://pytorch.org/blog/flash-decoding/), with its second launch folded into the first; latents
        as keys and values as in DeepSeek-V2 (https://arxiv.org/abs/2405.04434).
    """
    check_kernel("latent_decode", args)
    query, query_rope, latent, rope = map(inner_contiguous, args[:4])
    (rows, heads, rank), size, page_size = query.shape, query_rope.shape[2], args.pages.shape[1]
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if not out.numel():
        return out
    chosen = None if args.chosen is None else args.chosen.contiguous()
    tile = query_tile(heads, rank).heads
    head_tiles, row_tiles = -(-heads // tile), -(-rows // tiling.row_tile)
    # The only program of a row touches none of these; their types would make it another kernel.
    partial_results = head_tiles * tiling.programs * row_tiles if tiling.programs > 1 else 0
    partials = torch.empty((partial_results, tile, rank), dtype=torch.float32, device=query.device)
    partial_lses = torch.empty((partial_results, tile), dtype=torch.float32, device=query.device)
    arrivals = zeroed_counters.take(rows * head_tiles, query.device) if partial_results else args.starts
    columns = min(rank, MERGED_COLUMNS)
    constants: dict[str, Any] = {
        "ROWS": 1 if tiling.row_tile == 1 else MAX_ROWS, "MOST": MAX_SHARES, "TILE": tile, "RANK": rank, "ROPE": size,
        "PAGE": page_size, "BLOCK": tiling.block, "COLUMNS": columns,
        "CHUNK": max(1, MERGED_VALUES // (tile * columns)), "STAGES": tiling.stages, "SHARE_EQUAL": tiling.share_equal,
        "PDL": pdl, "num_warps": tiling.warps, **({"launch_pdl": True} if pdl else {}),
    }  # fmt: skip
    _latent_decode[(head_tiles, row_tiles, tiling.programs)](
        query, query_rope, latent, rope, args.pages, args.starts, args.lengths, args.indices, chosen,
        out, lse, partials, partial_lses, arrivals,
        *query.stride()[:2], *query_rope.stride()[:2], latent.stride(0), rope.stride(0),
        rows, tiling.row_tile, heads, tiling.unsplit, tiling.min_share,
        0 if chosen is None else chosen.shape[1], args.scale * math.log2(math.e), **constants,
    )  # fmt: skip
    return out
