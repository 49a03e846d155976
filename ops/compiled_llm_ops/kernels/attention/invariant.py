"""A Triton kernel for causal attention over pages, in which a query's bits depend on its own row's tokens alone.

It serves prefill and decode: packed queries, any number of each row; and prefill with a variant. A program has a tile
of queries of one row and kv head, and reads the row's keys in tiles that begin at fixed positions, in ascending order,
each time in the same way. Tiles of which a query sees nothing change nothing for it, whatever other queries see of
them, and nothing is divided by the number of rows or their lengths.

Shapes: B rows, T packed tokens, H query heads, K kv heads, G query heads of one kv head, D head dimension, D' the same
as stored, P pages, S page size, Q queries of a tile.
"""

# Kernels are Triton's objects, not the functions that a type checker sees.
# pyright: reportIndexIssue=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

import math
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from compiled_llm_ops.kernels.attention.decode import DTYPES, capped
from compiled_llm_ops.kernels.attention.fp8 import add_values, as_multiplied, faded, no_values, summed
from compiled_llm_ops.kernels.attention.invariant_tiling import InvariantTiling
from compiled_llm_ops.kernels.variant import KernelVariant, transformed


class PackedQueries(NamedTuple):
    """Queries of rows, and where the rows' tokens lie.

    Attributes:
        query: ``[T, H, D]`` float16 or bfloat16, any strides.
        pages: ``[P, 2, K, S, D']``, contiguous, with D' a power of two from 16 on.
        qo_indptr: ``[B + 1]`` int32, row b's queries are tokens ``qo_indptr[b]:qo_indptr[b + 1]``, its last ones. None
            if rows have equally many.
        starts: ``[B]`` or longer, int32, where each row's pages begin in ``indices``.
        lengths: ``[B]`` int32, tokens of each row, those of the queries included.
        indices: ``[N]`` int32, page numbers.
        scale: factor on the logits.
        window_left: tokens visible to the left of each query; -1 for all.
        logits_soft_cap: ``cap * tanh(logits / cap)``; 0.0 for none.
        key_scale: ``[K]`` float32 for pages of fp8; None for 1.
        value_scale: ``[K]`` float32, the same for values.
    """

    query: Tensor
    pages: Tensor
    qo_indptr: Tensor | None
    starts: Tensor
    lengths: Tensor
    indices: Tensor
    scale: float
    window_left: int
    logits_soft_cap: float
    key_scale: Tensor | None
    value_scale: Tensor | None


@triton.jit
def _row_of(tile, qo_indptr, rows, TOKENS: tl.constexpr):
    """Return the row of a tile: row b has the tiles from ``qo_indptr[b] // TOKENS + b`` on, one too many at times."""
    low, high = 0, rows
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(qo_indptr + middle) // TOKENS + middle <= tile:
            low = middle
        else:
            high = middle
    return low


# One kernel for all batches: neither strides nor addresses that come with a batch make another one of it.
@triton.jit(
    do_not_specialize=["row_stride", "head_stride", "rows", "window_left"],
    do_not_specialize_on_alignment=["query", "qo_indptr", "starts", "lengths", "indices"],
)
def _invariant_attention(
    query, pages, qo_indptr, starts, lengths, indices, out, lse, key_scale, value_scale, tensors, sizes,
    row_stride, head_stride, rows, window_left, scale, cap,
    QUERIES: tl.constexpr, GQA: tl.constexpr, HEAD: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    KEYS: tl.constexpr, STAGES: tl.constexpr, CAPPED: tl.constexpr, NEW: tl.constexpr,
    VARIANT: tl.constexpr = None, LOGITS: tl.constexpr = None, VISIBLE: tl.constexpr = None,
    SUMMED: tl.constexpr = None,
):  # fmt: skip
    """Attend with one tile of queries of one row and kv head; axes of the grid: tiles, kv heads.

    Query ``GQA * i + g`` of the tile is query head g of its token i. Without ``qo_indptr`` each row has NEW tokens.
    """
    TOKENS: tl.constexpr = QUERIES // GQA
    tile, head = tl.program_id(0), tl.program_id(1)
    heads = tl.num_programs(1)
    if qo_indptr is None:
        TILES: tl.constexpr = (NEW + TOKENS - 1) // TOKENS
        row = tile // TILES
        row_begin, row_end = row * NEW, row * NEW + NEW
        first_token = row_begin + tile % TILES * TOKENS
    else:
        row = _row_of(tile, qo_indptr, rows, TOKENS)
        row_begin, row_end = tl.load(qo_indptr + row), tl.load(qo_indptr + row + 1)
        first_token = row_begin + (tile - row_begin // TOKENS - row) * TOKENS
    if first_token < row_end:
        length, own_indices = tl.load(lengths + row), indices + tl.load(starts + row)
        values_offset = heads * (PAGE * DIM)
        head_pages = pages + head * (PAGE * DIM)
        offs_m, offs_n, offs_d = tl.arange(0, QUERIES), tl.arange(0, KEYS), tl.arange(0, DIM)
        token, in_head = first_token + offs_m // GQA, offs_d[None, :] < HEAD
        used = (offs_m < TOKENS * GQA) & (token < row_end)
        head_ids = head * GQA + offs_m % GQA
        offs_q = token.to(tl.int64) * row_stride + head_ids * head_stride
        q = tl.load(query + offs_q[:, None] + offs_d[None, :], mask=used[:, None] & in_head, other=0.0)
        # Where the queries are in the row; those of padding see what the last one does.
        own = length - row_end + tl.minimum(token, row_end - 1)
        nearest = tl.maximum(own - window_left, 0)
        last = length - row_end + tl.minimum(first_token + TOKENS, row_end) - 1
        first = tl.maximum(length - row_end + first_token - window_left, 0)
        if key_scale is not None:
            scale *= tl.load(key_scale + head)
        q, factor = as_multiplied(q, scale, pages)
        largest = tl.full([QUERIES], -float("inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        sums, values_ptr = no_values(QUERIES, DIM, pages), head_pages + values_offset
        for block in tl.range(first // KEYS, last // KEYS + 1, num_stages=STAGES):
            position = block * KEYS + offs_n
            # Pages before all windows may be free, and hold values (NaN) whose product with zero is not zero.
            mask = (position >= first) & (position <= last)
            page = tl.load(own_indices + position // PAGE, mask=mask, other=0)
            slot = page.to(tl.int64) * (2 * values_offset) + (position % PAGE) * DIM
            k = tl.load(head_pages + slot[None, :] + offs_d[:, None], mask=mask[None, :], other=0.0)
            logits = tl.dot(q, k.to(q.dtype)) * factor
            if CAPPED:
                logits = capped(logits, cap)
            seen = (position[None, :] <= own[:, None]) & (position[None, :] >= nearest[:, None])
            if VARIANT:
                tokens = tl.minimum(token, row_end - 1)[:, None]
                logits = transformed(
                    logits, seen, row, head_ids[:, None], tokens, own[:, None], position[None, :], tensors, sizes,
                    LOGITS, VISIBLE, SUMMED,
                )  # fmt: skip
            else:
                logits = tl.where(seen, logits, -float("inf"))
            if not SUMMED:
                larger = tl.maximum(largest, tl.max(logits, 1))
                base = tl.where(larger == -float("inf"), 0.0, larger)  # no key was seen yet
                weights = tl.exp2(logits - base[:, None])
                fade = tl.exp2(largest - base)
            if SUMMED:
                sums = add_values(sums, logits.to(q.dtype), values_ptr, slot, mask, DIM)
            else:
                sums = add_values(faded(sums, fade), weights.to(q.dtype), values_ptr, slot, mask, DIM)
                total = total * fade + tl.sum(weights, 1)
                largest = larger
        if VARIANT:
            total = tl.where(total == 0.0, 1.0, total)  # no key was seen, or none is counted
        values = summed(sums) / total[:, None]
        if value_scale is not None:
            values *= tl.load(value_scale + head)
        offs_o = token.to(tl.int64) * (heads * GQA) + head_ids
        out_ptrs = out + offs_o[:, None] * HEAD + offs_d[None, :]
        tl.store(out_ptrs, values.to(out.dtype.element_ty), mask=used[:, None] & in_head)
        if lse is not None:
            tl.store(lse + offs_o, largest + tl.log2(total), mask=used)


def attend(
    args: PackedQueries, out: Tensor, lse: Tensor | None, tiling: InvariantTiling, variant: KernelVariant | None = None
) -> None:
    """Launch attention. All is on one device, the current one.

    Args:
        args: checked; each row that has queries has a page at least.
        out: ``[T, H, D]``, contiguous, written.
        lse: ``[T, H]`` float32, contiguous, written: the log-sum-exp in base 2. None to skip it.
        tiling: that of the heads' size; another one gives other bits.
        variant: what becomes of logits; without a cap. None if nothing does.

    Raises:
        ValueError: the query's dtype has no kernel, or the pages are not contiguous.

    Source:
        FlashAttention-2 (https://arxiv.org/abs/2307.08691); why a fixed order of sums:
        https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/.
    """
    if args.query.dtype not in DTYPES:
        raise ValueError(
            f"invariant_attention: no kernel for {args.query.dtype} queries; use torch.bfloat16 or torch.float16"
        )
    if not args.pages.is_contiguous():
        raise ValueError("invariant_attention: pages must be contiguous")
    query = args.query if args.query.stride(2) == 1 else args.query.contiguous()
    key_scale, value_scale = (
        scale if scale is None else scale.contiguous() for scale in (args.key_scale, args.value_scale)
    )
    (tokens, heads, head_dim), (_, _, kv_heads, page_size, stored) = query.shape, args.pages.shape
    rows, gqa = len(args.lengths), heads // kv_heads
    if not tokens:
        return
    each, new = tiling.queries // gqa, 0  # tokens of a tile, and of a row if all have as many
    tiles = tokens // each + rows  # at least as many as all rows have
    if args.qo_indptr is None:
        new = tokens // rows
        tiles = rows * -(-new // each)
    window_left = args.window_left if args.window_left >= 0 else 2**30
    factor, cap = args.scale * math.log2(math.e), 0.0
    if args.logits_soft_cap > 0:
        factor, cap = args.scale / args.logits_soft_cap, args.logits_soft_cap * math.log2(math.e)
    tensors, sizes = None, None
    if variant is not None:
        factor, (tensors, sizes) = args.scale, variant.arguments
    constants: dict[str, Any] = {
        "QUERIES": tiling.queries, "GQA": gqa, "HEAD": head_dim, "DIM": stored, "PAGE": page_size,
        "KEYS": tiling.keys, "STAGES": tiling.stages, "CAPPED": cap > 0, "NEW": new, "num_warps": tiling.warps,
        "enable_fp_fusion": False, **({} if variant is None else variant.constants),
    }  # fmt: skip
    _invariant_attention[(tiles, kv_heads)](
        query, args.pages, args.qo_indptr, args.starts, args.lengths, args.indices, out, lse, key_scale, value_scale,
        tensors, sizes, *query.stride()[:2], rows, window_left, factor, cap, **constants,
    )  # fmt: skip
