"""A Triton kernel for attention over blocks of keys that work items list."""

# A work item is some queries of a row of blocks, with all query heads of a kv head, and the entries of a list of blocks
# that they read. If several items share a row, the last one to end merges what they have found, always in the same
# order.
# Shapes: M queries, N keys, H query heads, K kv heads, G query heads of one kv head, Q queries and heads of a program,
# D head dimension, D' the same as a power of two, X entries, R queries of a block, C keys of an entry at most, W work
# items.

# Kernels are Triton's objects, not the functions that a type checker sees.
# pyright: reportIndexIssue=false

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_llm_flashinfer.ops.contracts import SPARSE_PIECE, BlockSparseAttention, VariableBlockSparseAttention
from compiled_llm_flashinfer.ops.kernels.sparse.block_sparse_tiling import (
    SparseTile,
    missing_kernel,
    most_programs,
    sparse_merge,
    sparse_tile,
)
from compiled_llm_ops.kernels.attention.decode import _merge
from compiled_llm_ops.kernels.counters import zeroed_counters
from compiled_llm_ops.kernels.logits import capped, weighed


@triton.jit
def _load_entries(entries, entry, within, known, C: tl.constexpr, VARIABLE: tl.constexpr):
    """Return the keys at places ``within`` entries of the list, and which of them exist."""
    if VARIABLE:
        first = tl.load(entries + 2 * entry, mask=known, other=0)
        return first + within, known & (within < tl.load(entries + 2 * entry + 1, mask=known, other=0))
    return tl.load(entries + entry, mask=known, other=0) * C + within, known


@triton.jit(do_not_specialize=["items", "heads", "max_parts"])
def _block_sparse_attention(
    query, key, value, entries, work_items, mask, out, lse, partials, partial_lses, arrivals,
    query_stride, query_head_stride, key_stride, key_head_stride, value_stride, value_head_stride,
    items, heads, max_parts, scale, cap,
    GQA: tl.constexpr, QUERIES: tl.constexpr, USED: tl.constexpr, HEAD: tl.constexpr, DIM: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
    STAGES: tl.constexpr, CAPPED: tl.constexpr, VARIABLE: tl.constexpr,
):  # fmt: skip
    """Attend by work items. Axes of the grid: kv heads unless items have one; programs, which take items in turn."""
    # Programs without any, as unused items make them, begin last: among others they may leave processors idle.
    # ``entries`` are ``indices`` ``[X]``, or ``[X, 2]`` if they are VARIABLE. ``partials`` holds ``max_parts`` [USED,
    # D'] for each kv head of the grid; ``arrivals`` as many zeros, which they are again afterwards.
    grid_head, number = tl.program_id(0), tl.program_id(1)
    queries = tl.load(work_items + number * 8 + 2)
    while queries > 0:  # unused items are the last ones
        item = work_items + number * 8
        head, first_query = grid_head, tl.load(item + 1)
        if VARIABLE:
            head = tl.load(item)
        first_entry, count = tl.load(item + 3), tl.load(item + 4)
        first_part, part, parts = tl.load(item + 5), tl.load(item + 6), tl.load(item + 7)
        offs_q, offs_n, offs_d = tl.arange(0, QUERIES), tl.arange(0, BLOCK), tl.arange(0, DIM)
        token = (first_query + offs_q // GQA).to(tl.int64)
        own_head = head * GQA + offs_q % GQA
        used, in_head = offs_q // GQA < queries, offs_d < HEAD
        q_ptrs = query + (token * query_stride + own_head * query_head_stride)[:, None] + offs_d[None, :]
        q = tl.load(q_ptrs, mask=used[:, None] & in_head[None, :], other=0.0)
        keys, values = key + head.to(tl.int64) * key_head_stride, value + head.to(tl.int64) * value_head_stride
        largest = tl.full([QUERIES], -float("inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        acc = tl.zeros([QUERIES, DIM], tl.float32)
        for block in tl.range(0, tl.cdiv(count * C, BLOCK), num_stages=STAGES):
            place = block * BLOCK + offs_n
            entry, within = first_entry + place // C, place % C
            at, known = _load_entries(entries, entry, within, place // C < count, C, VARIABLE)
            k_ptrs = keys + at.to(tl.int64)[None, :] * key_stride + offs_d[:, None]
            k = tl.load(k_ptrs, mask=known[None, :] & in_head[:, None], other=0.0)
            logits = tl.dot(q, k) * scale
            if CAPPED:
                logits = capped(logits, cap)
            seen = known[None, :]
            if mask is not None:
                places = entry.to(tl.int64)[None, :] * (R * C) + (token % R)[:, None] * C + within[None, :]
                seen = seen & used[:, None]
                seen = seen & (tl.load(mask + places, mask=seen, other=0) != 0)
            logits = tl.where(seen, logits, -float("inf"))
            weights, fade, larger = weighed(logits, largest, True)
            v_ptrs = values + at.to(tl.int64)[:, None] * value_stride + offs_d[None, :]
            v = tl.load(v_ptrs, mask=known[:, None] & in_head[None, :], other=0.0)
            acc = tl.dot(weights.to(q.dtype), v, acc * fade[:, None])
            total = total * fade + tl.sum(weights, 1)
            largest = larger
        total = tl.where(total == 0.0, 1.0, total)
        found, lses = acc / total[:, None], largest + tl.log2(total)
        own = token * heads + own_head
        if parts == 1:
            out_ptrs = out + own[:, None] * HEAD + offs_d[None, :]
            tl.store(out_ptrs, found.to(out.dtype.element_ty), mask=used[:, None] & in_head[None, :])
            if lse is not None:
                tl.store(lse + own, lses, mask=used)
        else:
            first = grid_head * max_parts + first_part
            own_partial, in_part = (first + part) * USED + offs_q, offs_q < USED
            own_ptrs = partials + own_partial[:, None] * DIM + offs_d[None, :]
            tl.store(own_ptrs, found, mask=in_part[:, None], cache_modifier=".cg")
            tl.store(partial_lses + own_partial, lses, mask=in_part, cache_modifier=".cg")
            tl.debug_barrier()  # every thread's part is written before one of them says so
            if tl.atomic_add(arrivals + first, 1, sem="acq_rel", scope="gpu") == parts - 1:
                offs_u = tl.arange(0, USED)
                merged_own = (first_query + offs_u // GQA).to(tl.int64) * heads + head * GQA + offs_u % GQA
                merged_used = offs_u // GQA < queries
                for column in tl.range(0, DIM, COLUMNS):
                    merged, merged_lses = _merge(
                        partials + column, partial_lses, first, parts, True, USED, COLUMNS, CHUNK, DIM
                    )
                    merged = tl.where((merged_lses == -float("inf"))[:, None], 0.0, merged)
                    offs_c = column + tl.arange(0, COLUMNS)
                    out_ptrs = out + merged_own[:, None] * HEAD + offs_c[None, :]
                    keep = merged_used[:, None] & (offs_c < HEAD)[None, :]
                    tl.store(out_ptrs, merged.to(out.dtype.element_ty), mask=keep)
                    if lse is not None:
                        tl.store(lse + merged_own, merged_lses, mask=merged_used)
                tl.store(arrivals + first, 0)
        number += tl.num_programs(1)
        queries = tl.load(work_items + number * 8 + 2, mask=number < items, other=0)


def attend(
    op: str,
    args: BlockSparseAttention | VariableBlockSparseAttention,
    wants_lse: bool,
    processors: int,
    tile: SparseTile | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Launch attention by work items; ``[M, H, D]``, contiguous, and ``[M, H]`` float32, the log-sum-exp in base 2."""
    # ``tile`` has as many queries as that of ``sparse_tile``. ValueError if there is no kernel for this head size or
    # dtype, or partial results have no room.
    query, key, value = (
        states if states.stride(2) == 1 else states.contiguous() for states in (args.query, args.key, args.value)
    )
    (queries, heads, head_dim), kv_heads, device = query.shape, key.shape[1], query.device
    if (missing := missing_kernel(head_dim, query.dtype)) is not None:
        raise ValueError(f"{op}: {missing}")
    out = torch.empty(query.shape, dtype=query.dtype, device=device)
    lse = torch.empty((queries, heads), dtype=torch.float32, device=device) if wants_lse else None
    items = args.work_items.contiguous()
    if not out.numel() or not len(items):
        return out, lse
    variable = isinstance(args, VariableBlockSparseAttention)
    own_tile, block_rows, piece, entries, mask = _of(args, queries, heads // kv_heads)
    tile = tile or own_tile
    grid_heads, stored = 1 if variable else kv_heads, max(16, triton.next_power_of_2(head_dim))
    merge = sparse_merge(tile.queries if variable else min(block_rows, tile.queries), heads // kv_heads, stored)
    partial_results = grid_heads * args.max_parts
    if partial_results * merge.rows * stored >= 2**31:
        raise ValueError(f"{op}: max_parts={args.max_parts} partial results for each kv head have no room; take fewer")
    partials = torch.empty((partial_results, merge.rows, stored), dtype=torch.float32, device=device)
    partial_lses = torch.empty((partial_results, merge.rows), dtype=torch.float32, device=device)
    arrivals = zeroed_counters.take(max(1, partial_results), device)
    cap = args.logits_soft_cap
    factor, cap = (args.scale / cap, cap * math.log2(math.e)) if cap > 0 else (args.scale * math.log2(math.e), 0.0)
    _block_sparse_attention[(grid_heads, min(len(items), most_programs(processors, grid_heads)))](
        query, key, value, entries, items, mask, out, lse, partials, partial_lses, arrivals,
        *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], len(items), heads, args.max_parts,
        factor, cap,
        GQA=heads // kv_heads, QUERIES=tile.padded, USED=merge.rows, HEAD=head_dim, DIM=stored,
        R=block_rows, C=piece, BLOCK=tile.block, COLUMNS=merge.columns, CHUNK=merge.chunk,
        STAGES=tile.stages, CAPPED=cap > 0, VARIABLE=variable, num_warps=tile.warps,
    )  # fmt: skip
    return out, lse


def _of(
    args: BlockSparseAttention | VariableBlockSparseAttention, queries: int, gqa: int
) -> tuple[SparseTile, int, int, Tensor, Tensor | None]:
    """Return the tile, R, the keys of an entry, the entries, and the mask as bytes."""
    head_dim = args.query.shape[2]
    if isinstance(args, VariableBlockSparseAttention):
        rows = max(1, -(-queries // max(1, args.block_mask_map.shape[1])))
        return sparse_tile(rows, gqa, head_dim), 1, SPARSE_PIECE, args.pieces.contiguous(), None
    mask = None if args.mask is None else args.mask.view(torch.uint8)
    indices = args.indices.contiguous()
    tile = sparse_tile(args.block_rows, gqa, head_dim, mask is not None)
    return tile, args.block_rows, args.block_columns, indices, mask
