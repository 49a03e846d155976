"""A Triton kernel that attends over runs of pages which several rows share, once for all of them."""

# Queries of up to 64 heads, those of one kv head in several rows, are a tile that tensor cores multiply with each block
# of keys, where the decode kernel would read the block again for each row.
# The grid does not depend on how many runs there are. Its programs take work items in turn, until they find an unused
# one, so a captured launch stays valid when rows come and go.
# Shapes: B rows, H query heads, K kv heads, G query heads of one kv head, D head dimension, D' the same as stored, P
# pages, S page size, Q queries of a tile, W work items.

# Kernels are Triton's objects, not the functions that a type checker sees.
# pyright: reportIndexIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_llm_ops.attention.cascade.contract import CASCADE_LEVELS, CascadeAttention
from compiled_llm_ops.attention.cascade.kernels.tiling import CascadeTiling
from compiled_llm_ops.contracts import CASCADE_QUERIES
from compiled_llm_ops.kernels.attention.launching import check_launch, contiguous, factors, with_whole_heads
from compiled_llm_ops.kernels.attention.rotary import prepared
from compiled_llm_ops.kernels.attention.scaled import add_values, as_multiplied, faded, no_values, summed
from compiled_llm_ops.kernels.logits import capped, weighed

DTYPES = (torch.float16, torch.bfloat16)

PARTS_AT_ONCE = 8  # parts that are loaded at a time; not yet fitted


@triton.jit
def _attend(
    q, keys_ptr, indices_ptr, values_offset, first, count, nearest, scale, cap,
    PAGE: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Return ``[Q, D']`` and its log-sum-exp ``[Q]`` in base 2, over ``count`` keys, the ones from ``first`` on."""
    # Queries do not see keys before ``nearest`` ``[Q]``; one that sees none has zeros, and minus infinity. Keys before
    # ``first``, which no query sees, are not read: their pages may be free, and hold values (NaN) whose product with
    # zero is not zero.
    offs_n, offs_d = tl.arange(0, BLOCK), tl.arange(0, DIM)
    largest = tl.full([q.shape[0]], -float("inf"), tl.float32)
    total = tl.zeros([q.shape[0]], tl.float32)
    sums = no_values(q.shape[0], DIM, keys_ptr)
    for block in tl.range(first // BLOCK, tl.cdiv(count, BLOCK), num_stages=STAGES):
        position = block * BLOCK + offs_n
        mask = position < count
        if WINDOWED:
            mask = mask & (position >= first)
        page = tl.load(indices_ptr + position // PAGE, mask=mask, other=0)
        slot = page.to(tl.int64) * (2 * values_offset) + (position % PAGE) * DIM
        k = tl.load(keys_ptr + slot[None, :] + offs_d[:, None], mask=mask[None, :], other=0.0)
        logits = tl.dot(q, k.to(q.dtype)) * scale
        if CAPPED:
            logits = capped(logits, cap)
        seen = mask[None, :]
        if WINDOWED:
            seen = seen & (position[None, :] >= nearest[:, None])
        logits = tl.where(seen, logits, -float("inf"))
        weights, fade, larger = weighed(logits, largest, WINDOWED)  # else each query sees a key in each block
        sums = add_values(faded(sums, fade), weights.to(q.dtype), keys_ptr + values_offset, slot, mask, DIM)
        total = total * fade + tl.sum(weights, 1)
        largest = larger
    total_or_one = tl.where(total == 0.0, 1.0, total)
    return summed(sums) / total_or_one[:, None], largest + tl.log2(total_or_one)


@triton.jit(do_not_specialize=["items", "window_left"])
def _shared_prefix_attention(
    query, pages, lengths, indices, members, work_items, query_norm, cos, sin, parts, lses, key_scale, value_scale,
    row_stride, head_stride, items, window_left, scale, cap, epsilon,
    QUERIES: tl.constexpr, GQA: tl.constexpr, PADDED: tl.constexpr, HEAD: tl.constexpr, DIM: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Attend over the keys of one item after the other with the queries of its members, for one kv head."""
    # Axes of the grid: kv heads, programs. Query ``PADDED * i + g`` of the tile is query head g of member i.
    head, item = tl.program_id(0), tl.program_id(1)
    heads, programs = tl.num_programs(0), tl.num_programs(1)
    values_offset = heads * (PAGE * DIM)
    head_pages = pages + head * (PAGE * DIM)
    offs_m, offs_d = tl.arange(0, QUERIES), tl.arange(0, DIM)[None, :]
    member, in_group = offs_m // PADDED, offs_m % PADDED
    in_head = offs_d < HEAD
    count = tl.load(work_items + item * 6 + 4, mask=item < items, other=0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if key_scale is not None:
        scale *= tl.load(key_scale + head)
    while count > 0:
        own = work_items + item * 6
        first_page, position, keys = tl.load(own), tl.load(own + 1), tl.load(own + 2)
        first_member, first_part = tl.load(own + 3), tl.load(own + 5)
        used = (member < count) & (in_group < GQA)
        row = tl.load(members + first_member + member, mask=used, other=0)
        nearest = tl.zeros([QUERIES], tl.int32)
        first = 0
        if WINDOWED:
            # In keys from the item's first on, like the positions in the loop.
            ends = tl.load(lengths + row, mask=used, other=2**30)
            nearest = tl.maximum(ends - 1 - position - window_left, 0)
            first = tl.min(nearest)
        head_ids = head * GQA + in_group
        q_ptrs = query + (row * row_stride + head_ids * head_stride)[:, None]
        cos_ptrs, sin_ptrs = cos, sin
        if cos is not None:
            cos_ptrs, sin_ptrs = cos + (row * HEAD)[:, None], sin + (row * HEAD)[:, None]
        q = prepared(q_ptrs, offs_d, used[:, None] & in_head, query_norm, cos_ptrs, sin_ptrs, epsilon, HEAD)
        q, factor = as_multiplied(q, scale, pages)
        values, sums = _attend(
            q, head_pages, indices + first_page, values_offset, first, keys, nearest, factor, cap,
            PAGE, DIM, BLOCK, CAPPED, WINDOWED, STAGES,
        )  # fmt: skip
        if value_scale is not None:
            values *= tl.load(value_scale + head)
        # There may be more values of parts than an int32 counts.
        offs_p = (first_part + member).to(tl.int64) * (heads * GQA) + head_ids
        tl.store(parts + offs_p[:, None] * HEAD + offs_d, values, mask=used[:, None] & in_head)
        tl.store(lses + offs_p, sums, mask=used)
        item += programs
        count = tl.load(work_items + item * 6 + 4, mask=item < items, other=0)


def attend_over_runs(args: CascadeAttention, *, tiling: CascadeTiling, pdl: bool) -> tuple[Tensor, Tensor]:
    """Launch attention over all work items: parts ``[max_parts, H, D]`` and log-sum-exps in base 2, both float32."""
    # Both are uninitialised where no item writes. ``args`` are checked; the query is float16 or bfloat16, or
    # ValueError, ``pages`` ``[P, 2, K, S, D']`` contiguous, with D' a power of two from 16 on.
    check_launch("cascade_attention", args.query, args.pages, DTYPES)
    (query,) = with_whole_heads(args.query)
    query_norm, cos, sin = contiguous(args.query_norm, args.cos, args.sin)
    key_scale, value_scale = contiguous(args.key_scale, args.value_scale)
    (_, heads, head_dim), (_, _, kv_heads, page_size, stored) = query.shape, args.pages.shape
    parts = torch.empty((args.max_parts, heads, head_dim), dtype=torch.float32, device=query.device)
    lses = torch.empty((args.max_parts, heads), dtype=torch.float32, device=query.device)
    factor, cap = factors(args.scale, args.logits_soft_cap)
    constants: dict[str, Any] = {
        "QUERIES": CASCADE_QUERIES, "GQA": heads // kv_heads, "PADDED": args.row_queries, "HEAD": head_dim,
        "DIM": stored, "PAGE": page_size, "BLOCK": tiling.block, "STAGES": tiling.stages, "CAPPED": cap > 0,
        "WINDOWED": args.window_left >= 0, "PDL": pdl, "num_warps": tiling.warps,
        **({"launch_pdl": True} if pdl else {}),
    }  # fmt: skip
    _shared_prefix_attention[(kv_heads, tiling.programs)](
        query, args.pages, args.lengths, args.indices, args.members, args.work_items, query_norm, cos, sin, parts,
        lses, key_scale, value_scale, *query.stride()[:2], len(args.work_items), args.window_left, factor, cap,
        args.epsilon, **constants,
    )  # fmt: skip
    return parts, lses


@triton.jit
def _merge_state_parts(
    v, s, parts, lses, merge_parts, heads,
    LEVELS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one row and head into its state, level by level; a row without parts is left as it is."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    own = merge_parts + row * (3 * LEVELS)
    counts = 0
    for level in tl.static_range(LEVELS):
        counts += tl.load(own + 3 * level + 1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if counts > 0:
        item = row * heads + head
        offs_d = tl.arange(0, BLOCK)
        inside = offs_d < DIM
        largest = tl.load(s + item)
        merged = tl.load(v + item * DIM + offs_d, mask=inside, other=0.0).to(tl.float32)
        total = 1.0
        for level in tl.static_range(LEVELS):
            first, count, distance = (
                tl.load(own + 3 * level), tl.load(own + 3 * level + 1), tl.load(own + 3 * level + 2)
            )  # fmt: skip
            for start in tl.range(0, count, CHUNK):
                part = start + tl.arange(0, CHUNK)
                offs_p = (first + part * distance).to(tl.int64) * heads + head
                others = tl.load(lses + offs_p, mask=part < count, other=-float("inf"))
                # Values of a part that has seen no key are not read.
                seen = (others > -float("inf"))[:, None] & inside[None, :]
                values = tl.load(parts + offs_p[:, None] * DIM + offs_d[None, :], mask=seen, other=0.0).to(tl.float32)
                larger = tl.maximum(largest, tl.max(others))  # finite: a row's newest key is its own
                weights = tl.exp2(others - larger)
                fade = tl.exp2(largest - larger)
                merged = merged * fade + tl.sum(weights[:, None] * values, 0)
                total = total * fade + tl.sum(weights)
                largest = larger
        tl.store(v + item * DIM + offs_d, (merged / total).to(v.dtype.element_ty), mask=inside)
        tl.store(s + item, largest + tl.log2(total))


def merge_parts(v: Tensor, s: Tensor, parts: Tensor, lses: Tensor, table: Tensor, *, pdl: bool) -> None:
    """Launch the merge of parts ``[P, H, D]`` and ``[P, H]`` into the states ``[B, H, D]`` and ``[B, H]`` of rows."""
    # All is contiguous; ``table`` is ``merge_parts`` of ``cascade_attention``, and the log-sum-exps ``s`` are finite.
    # With ``pdl`` it begins before the previous kernel has ended.
    rows, heads, dim = v.shape
    if v.numel():
        _merge_state_parts[(rows, heads)](
            v, s, parts, lses, table, heads, LEVELS=CASCADE_LEVELS, DIM=dim, BLOCK=triton.next_power_of_2(dim),
            CHUNK=PARTS_AT_ONCE, PDL=pdl, num_warps=1, **({"launch_pdl": True} if pdl else {}),
        )  # fmt: skip
