"""A Triton kernel for causal attention of packed queries over pages, any number of each row, without a plan."""

# It serves prefill with ``backend="triton"`` and with functions of logits, and all batch-invariant attention. A program
# has a tile of queries of one row and kv head, and reads the row's keys in tiles that begin at fixed positions, in
# ascending order, each time in the same way. Tiles of which a query sees nothing change nothing for it, whatever other
# queries see of them. So a query's bits depend on its own row's tokens and on the tiling alone: with one tiling for all
# batches, or tilings of equally many keys in which tensor cores add all that is added, they are the same in each.
# Shapes: B rows, T packed tokens, H query heads, K kv heads, G query heads of one kv head, D head dimension, D' the
# same as stored, P pages, S page size, Q queries of a tile.

# Kernels are Triton's objects, not the functions that a type checker sees.
# pyright: reportIndexIssue=false, reportOptionalSubscript=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_llm_ops.contracts import PagedAttention
from compiled_llm_ops.contracts.devices import device_of
from compiled_llm_ops.kernels.attention.decode import DTYPES
from compiled_llm_ops.kernels.attention.launching import check_launch, contiguous, factors, with_whole_heads
from compiled_llm_ops.kernels.attention.packed_tiling import PackedTiling, packed_tiling
from compiled_llm_ops.kernels.attention.scaled import add_values, as_multiplied, faded, no_values, summed
from compiled_llm_ops.kernels.logits import LogitsTransform, capped, transformed, weighed


class PackedQueries(NamedTuple):
    """Queries of rows, and where the rows' tokens lie."""

    query: Tensor  # ``[T, H, D]`` float16, bfloat16 or float32, any strides
    pages: Tensor  # ``[P, 2, K, S, D']``, contiguous, with D' a power of two from 16 on
    # ``[B + 1]`` int32, row b's queries are tokens ``qo_indptr[b]:qo_indptr[b + 1]``, its last ones. None if rows have
    # equally many
    qo_indptr: Tensor | None
    # ``[B]`` or longer, int32, where each row's pages begin in ``indices``; ``[B + 1]`` without ``lengths``
    starts: Tensor
    # ``[B]`` int32, tokens of each row, those of the queries included. None to go by ``last_page_len``
    lengths: Tensor | None
    indices: Tensor  # ``[N]`` int32, page numbers
    scale: float
    window_left: int  # tokens visible to the left of each query; -1 for all
    logits_soft_cap: float  # ``cap * tanh(logits / cap)``; 0.0 for none
    key_scale: Tensor | None  # ``[K]`` float32 for pages with scales; None for 1
    value_scale: Tensor | None  # ``[K]`` float32, the same for values
    last_page_len: Tensor | None = None  # ``[B]`` int32, tokens in each row's last page; None if there are ``lengths``

    @classmethod
    def of(cls, args: PagedAttention) -> PackedQueries:
        return cls(
            args.query, args.pages, args.qo_indptr, args.indptr, None, args.indices, args.scale, args.window_left,
            args.logits_soft_cap, args.key_scale, args.value_scale, args.last_page_len,
        )  # fmt: skip

    @property
    def rows(self) -> int:
        """B."""
        counted = self.last_page_len if self.lengths is None else self.lengths
        assert counted is not None, "lengths or last_page_len"
        return len(counted)


@triton.jit
def row_of(tile, qo_indptr, rows, QUERIES: tl.constexpr, GQA: tl.constexpr):
    """Return a tile's row: row b has those from ``qo_indptr[b] * GQA // QUERIES + b`` on, one too many at times."""
    low, high = 0, rows
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(qo_indptr + middle) * GQA // QUERIES + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def with_block(
    sums, total, largest, block, q, factor, head_pages, values_ptr, own_indices, first, last, own, nearest,
    row, token, head_ids, tensors, sizes, cap, values_offset,
    DIM: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr, WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr, TRANSFORMED: tl.constexpr, LOGITS: tl.constexpr, VISIBLE: tl.constexpr, SUMMED: tl.constexpr,
    ORDERED: tl.constexpr,
):  # fmt: skip
    """Return the sums of values, those of weights and the largest logits with those of a block of keys."""
    # Unless MASKED, all queries see all of its keys. Both ways round alike: a sum of the same blocks has the same bits.
    position, offs_d = block * KEYS + tl.arange(0, KEYS), tl.arange(0, DIM)
    if MASKED:
        # Pages before all windows may be free, and hold values (NaN) whose product with zero is not zero.
        mask = (position >= first) & (position <= last)
        page = tl.load(own_indices + position // PAGE, mask=mask, other=0)
    else:
        mask = None
        page = tl.load(own_indices + position // PAGE)
    slot = page.to(tl.int64) * (2 * values_offset) + (position % PAGE) * DIM
    if MASKED:
        k = tl.load(head_pages + slot[None, :] + offs_d[:, None], mask=mask[None, :], other=0.0)
    else:
        k = tl.load(head_pages + slot[None, :] + offs_d[:, None])
    logits = tl.dot(q, k.to(q.dtype), input_precision="ieee") * factor
    if CAPPED:
        logits = capped(logits, cap)
    seen = None
    if MASKED:
        seen = position[None, :] <= own[:, None]
        if WINDOWED:
            seen = seen & (position[None, :] >= nearest[:, None])
    if TRANSFORMED:
        logits = transformed(
            logits, seen, row, head_ids[:, None], token[:, None], own[:, None], position[None, :], tensors, sizes,
            LOGITS, VISIBLE, SUMMED,
        )  # fmt: skip
    elif MASKED:
        logits = tl.where(seen, logits, -float("inf"))
    if SUMMED:
        return add_values(sums, logits.to(q.dtype), values_ptr, slot, mask, DIM), total, largest
    else:  # noqa: RET505  the kernel has one branch, known when it is compiled
        weights, fade, larger = weighed(logits, largest, True)
        sums = add_values(faded(sums, fade), weights.to(q.dtype), values_ptr, slot, mask, DIM)
        if ORDERED:
            # Tensor cores add in the order of keys; which threads add weights, and when, follows from the tiling.
            ones = tl.full([KEYS, 32], 1.0, q.dtype)
            total = tl.dot(weights.to(q.dtype), ones, total * fade[:, None], input_precision="ieee")
        else:
            total = total * fade + tl.sum(weights, 1)
        return sums, total, larger


# One kernel for all batches: neither strides nor addresses that come with a batch make another one of it.
@triton.jit(
    do_not_specialize=["row_stride", "head_stride", "rows", "window_left"],
    do_not_specialize_on_alignment=["query", "qo_indptr", "starts", "lengths", "indices", "last_page_len"],
)
def _packed_attention(
    query, pages, qo_indptr, starts, lengths, indices, last_page_len, out, lse, key_scale, value_scale, tensors, sizes,
    row_stride, head_stride, rows, window_left, scale, cap,
    QUERIES: tl.constexpr, GQA: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr, DIM: tl.constexpr,
    PAGE: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
    NEW: tl.constexpr, TRANSFORMED: tl.constexpr = None, LOGITS: tl.constexpr = None, VISIBLE: tl.constexpr = None,
    SUMMED: tl.constexpr = None, PDL: tl.constexpr = False, ORDERED: tl.constexpr = False,
):  # fmt: skip
    """Attend with one tile of queries of one row and kv head. Later ones see more keys, so they begin first."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    # A row's queries are counted from its first token on: GQA query heads of each. Without ``qo_indptr`` each row has
    # NEW tokens.
    tile, head = (tl.num_programs(0) - 1 - tl.program_id(0)) // KV_HEADS, tl.program_id(0) % KV_HEADS
    if qo_indptr is None:
        TILES: tl.constexpr = (NEW * GQA + QUERIES - 1) // QUERIES
        row = tile // TILES
        row_begin, row_end = row * NEW, row * NEW + NEW
        first_query = tile % TILES * QUERIES
    else:
        row = row_of(tile, qo_indptr, rows, QUERIES, GQA)
        row_begin, row_end = tl.load(qo_indptr + row), tl.load(qo_indptr + row + 1)
        first_query = (tile - row_begin * GQA // QUERIES - row) * QUERIES
    end_query = tl.minimum(first_query + QUERIES, (row_end - row_begin) * GQA)
    if first_query < end_query:
        first_page = tl.load(starts + row)
        own_indices = indices + first_page
        if lengths is None:
            length = (tl.load(starts + row + 1) - first_page - 1) * PAGE + tl.load(last_page_len + row)
        else:
            length = tl.load(lengths + row)
        values_offset = KV_HEADS * (PAGE * DIM)
        head_pages = pages + head * (PAGE * DIM)
        offs_m, offs_d = first_query + tl.arange(0, QUERIES), tl.arange(0, DIM)
        token, in_head = row_begin + offs_m // GQA, offs_d[None, :] < HEAD
        used = offs_m < end_query
        head_ids = head * GQA + offs_m % GQA
        offs_q = token.to(tl.int64) * row_stride + head_ids * head_stride
        q = tl.load(query + offs_q[:, None] + offs_d[None, :], mask=used[:, None] & in_head, other=0.0)
        # Where the queries are in the row; those of padding see what the last one does.
        token = tl.minimum(token, row_end - 1)
        own = length - row_end + token
        nearest = tl.maximum(own - window_left, 0) if WINDOWED else own
        before = length - (row_end - row_begin)
        first_own, last = before + first_query // GQA, before + (end_query - 1) // GQA
        first = tl.maximum(first_own - window_left, 0) if WINDOWED else 0
        if key_scale is not None:
            scale *= tl.load(key_scale + head)
        q, factor = as_multiplied(q, scale, pages)
        largest = tl.full([QUERIES], -float("inf"), tl.float32)
        total = tl.zeros([QUERIES, 32] if ORDERED else [QUERIES], tl.float32)
        sums, values_ptr = no_values(QUERIES, DIM, pages), head_pages + values_offset
        # Blocks that a window or the diagonal cuts are masked; in between, all queries see all keys. Blocks stay in
        # order, whichever they are: that depends on what else is in the tile.
        begin, end = first // KEYS, last // KEYS + 1
        whole = begin
        if WINDOWED:
            whole = tl.minimum((tl.maximum(last - window_left, 0) + KEYS - 1) // KEYS, end)
            for block in tl.range(begin, whole, num_stages=STAGES):
                sums, total, largest = with_block(
                    sums, total, largest, block, q, factor, head_pages, values_ptr, own_indices, first, last, own,
                    nearest, row, token, head_ids, tensors, sizes, cap, values_offset,
                    DIM, PAGE, KEYS, True, WINDOWED, CAPPED, TRANSFORMED, LOGITS, VISIBLE, SUMMED, ORDERED,
                )  # fmt: skip
        cut = tl.maximum((first_own + 1) // KEYS, whole)
        for block in tl.range(whole, cut, num_stages=STAGES):
            sums, total, largest = with_block(
                sums, total, largest, block, q, factor, head_pages, values_ptr, own_indices, first, last, own, nearest,
                row, token, head_ids, tensors, sizes, cap, values_offset,
                DIM, PAGE, KEYS, False, WINDOWED, CAPPED, TRANSFORMED, LOGITS, VISIBLE, SUMMED, ORDERED,
            )  # fmt: skip
        for block in tl.range(cut, end, num_stages=STAGES):
            sums, total, largest = with_block(
                sums, total, largest, block, q, factor, head_pages, values_ptr, own_indices, first, last, own, nearest,
                row, token, head_ids, tensors, sizes, cap, values_offset,
                DIM, PAGE, KEYS, True, WINDOWED, CAPPED, TRANSFORMED, LOGITS, VISIBLE, SUMMED, ORDERED,
            )  # fmt: skip
        if ORDERED:
            total = tl.max(total, 1)  # all 32 are the same
        if TRANSFORMED:
            total = tl.where(total == 0.0, 1.0, total)  # no key was seen, or none is counted
        values = summed(sums) / total[:, None]
        if value_scale is not None:
            values *= tl.load(value_scale + head)
        offs_o = token.to(tl.int64) * (KV_HEADS * GQA) + head_ids
        out_ptrs = out + offs_o[:, None] * HEAD + offs_d[None, :]
        tl.store(out_ptrs, values.to(out.dtype.element_ty), mask=used[:, None] & in_head)
        if lse is not None:
            tl.store(lse + offs_o, largest + tl.log2(total), mask=used)


def attend(
    args: PackedQueries,
    out: Tensor,
    lse: Tensor | None,
    tiling: PackedTiling | None = None,
    transform: LogitsTransform | None = None,
    pdl: bool = False,
) -> None:
    """Launch attention into ``out`` ``[T, H, D]``, contiguous, and ``lse`` ``[T, H]`` float32, in base 2, if any."""
    # ``args`` are checked; each row that has queries has a page at least. Another ``tiling`` than that of
    # ``packed_tiling`` gives other bits; with ``transform`` there is no cap. ValueError for dtypes without a kernel, or
    # pages that are not contiguous.
    check_launch("paged_attention", args.query, args.pages, DTYPES)
    (query,), (key_scale, value_scale) = with_whole_heads(args.query), contiguous(args.key_scale, args.value_scale)
    (tokens, heads, head_dim), (_, _, kv_heads, page_size, stored) = query.shape, args.pages.shape
    rows, gqa = args.rows, heads // kv_heads
    if not tokens:
        return
    if tiling is None:
        sizes_of_numbers = args.query.element_size(), args.pages.element_size()
        tiling = packed_tiling(tokens * gqa / rows, stored, *sizes_of_numbers, device_of(out.device).shared_memory)
    new = 0 if args.qo_indptr is not None else tokens // rows
    # Without the tokens of each row, at least as many tiles as all have.
    tiles = rows * -(-new * gqa // tiling.queries) if new else tokens * gqa // tiling.queries + rows
    factor, cap = factors(args.scale, args.logits_soft_cap)
    tensors, sizes = None, None
    if transform is not None:
        factor, (tensors, sizes) = transform.factor(args.scale), transform.arguments
    constants: dict[str, Any] = {
        "QUERIES": tiling.queries, "GQA": gqa, "KV_HEADS": kv_heads, "HEAD": head_dim, "DIM": stored, "PAGE": page_size,
        "KEYS": tiling.keys, "STAGES": tiling.stages, "WINDOWED": args.window_left >= 0, "CAPPED": cap > 0, "NEW": new,
        "num_warps": tiling.warps, "enable_fp_fusion": tiling.fuses, "ORDERED": tiling.ordered,
        **({} if transform is None else transform.constants), **({"PDL": True, "launch_pdl": True} if pdl else {}),
    }  # fmt: skip
    _packed_attention[(tiles * kv_heads,)](
        query, args.pages, args.qo_indptr, args.starts, args.lengths, args.indices, args.last_page_len, out, lse,
        key_scale, value_scale, tensors, sizes, *query.stride()[:2], rows, args.window_left, factor, cap, **constants,
    )  # fmt: skip
