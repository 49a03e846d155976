"""A Triton kernel for causal attention of packed rows over their own tokens: keys and values lie beside the queries."""

# A program has a tile of queries of one row and head. Keys have another size than values, 192 and 128 with DeepSeek-V3,
# so they are multiplied in two parts, each a power of two.
# Shapes: T packed tokens, B rows, H query heads, K key heads, D head dimension of queries and keys, E that of values, M
# queries of a program, N keys of a block.

# Kernels are Triton's objects, not the functions that a type checker sees.
# pyright: reportIndexIssue=false

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from compiled_llm_ops.kernels.attention.packed import row_of
from compiled_llm_ops.kernels.latent.latent_tiling import (
    DTYPES,
    RaggedTiling,
    head_parts,
    missing_expanded,
    ragged_tiling,
)
from compiled_llm_ops.kernels.latent.step import inner_contiguous
from compiled_llm_ops.kernels.logits import weighed


@triton.jit
def _attend_to_keys(
    q, q_rest, key, value, own, last, position, key_stride, value_stride, scale, largest, total, acc,
    HEAD: tl.constexpr, VALUE: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, PADDED: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Return the largest logits, sums of weights and of weighted values with the keys at ``position`` ``[N]`` more."""
    # Queries are at ``own`` ``[M]`` of the row, and none is past ``last``; without MASKED each sees all of these keys.
    offs_d, offs_v = tl.arange(0, MAIN), tl.arange(0, PADDED)
    read = position <= last if MASKED else position >= 0
    keys = key + position.to(tl.int64)[None, :] * key_stride
    logits = tl.dot(q, tl.load(keys + offs_d[:, None], mask=read[None, :], other=0.0))
    if REST > 0:
        offs_r = MAIN + tl.arange(0, REST)
        rest = tl.load(keys + offs_r[:, None], mask=read[None, :] & (offs_r[:, None] < HEAD), other=0.0)
        logits = tl.dot(q_rest, rest, logits)
    logits = logits * scale
    if MASKED:
        logits = tl.where(position[None, :] <= own[:, None], logits, -float("inf"))
    weights, fade, larger = weighed(logits, largest, False)
    values = value + position.to(tl.int64)[:, None] * value_stride + offs_v[None, :]
    v = tl.load(values, mask=read[:, None] & (offs_v[None, :] < VALUE), other=0.0)
    acc = tl.dot(weights.to(q.dtype), v, acc * fade[:, None])
    return larger, total * fade + tl.sum(weights, 1), acc


# One kernel for all batches: addresses that come with a batch make no other one of it.
@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["qo_indptr"])
def _ragged_attention(
    query, key, value, qo_indptr, out, lse,
    query_stride, query_head_stride, key_stride, key_head_stride, value_stride, value_head_stride, rows, scale,
    GROUP: tl.constexpr, HEAD: tl.constexpr, VALUE: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr,
    PADDED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attend with one tile of queries of one row and head; axes of the grid: heads, tiles, the last ones first."""
    head, tile = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
    heads = tl.num_programs(0)
    row = row_of(tile, qo_indptr, rows, QUERIES, 1)
    begin, end = tl.load(qo_indptr + row), tl.load(qo_indptr + row + 1)
    first = (tile - begin // QUERIES - row) * QUERIES  # in the row
    count = end - begin
    if first < count:
        offs_m, offs_n, offs_d = tl.arange(0, QUERIES), tl.arange(0, KEYS), tl.arange(0, MAIN)
        own = first + offs_m
        used = own < count
        token = begin.to(tl.int64) + own
        q_ptrs = query + token[:, None] * query_stride + head * query_head_stride
        q = tl.load(q_ptrs + offs_d[None, :], mask=used[:, None], other=0.0)
        q_rest = q
        if REST > 0:
            offs_r = MAIN + tl.arange(0, REST)
            q_rest = tl.load(q_ptrs + offs_r[None, :], mask=used[:, None] & (offs_r[None, :] < HEAD), other=0.0)
        own_key = key + begin.to(tl.int64) * key_stride + head // GROUP * key_head_stride
        own_value = value + begin.to(tl.int64) * value_stride + head // GROUP * value_head_stride
        largest = tl.full([QUERIES], -float("inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        acc = tl.zeros([QUERIES, PADDED], tl.float32)
        last = tl.minimum(first + QUERIES, count) - 1
        whole = (first + 1) // KEYS  # blocks of keys that all queries of the tile see
        for block in tl.range(0, whole, num_stages=STAGES):
            largest, total, acc = _attend_to_keys(
                q, q_rest, own_key, own_value, own, last, block * KEYS + offs_n, key_stride, value_stride, scale,
                largest, total, acc, HEAD, VALUE, MAIN, REST, PADDED, False,
            )  # fmt: skip
        for block in tl.range(whole, last // KEYS + 1, num_stages=STAGES):
            largest, total, acc = _attend_to_keys(
                q, q_rest, own_key, own_value, own, last, block * KEYS + offs_n, key_stride, value_stride, scale,
                largest, total, acc, HEAD, VALUE, MAIN, REST, PADDED, True,
            )  # fmt: skip
        offs_v = tl.arange(0, PADDED)
        item = token * heads + head
        out_ptrs = out + item[:, None] * VALUE + offs_v[None, :]
        values = acc / total[:, None]
        tl.store(out_ptrs, values.to(out.dtype.element_ty), mask=used[:, None] & (offs_v[None, :] < VALUE))
        if lse is not None:
            tl.store(lse + item, largest + tl.log2(total), mask=used)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    qo_indptr: Tensor,
    scale: float,
    out: Tensor,
    lse: Tensor | None,
    tiling: RaggedTiling | None = None,
) -> None:
    """Launch attention into ``out`` ``[T, H, E]``, contiguous, and ``lse`` ``[T, H]`` float32, in base 2, if any."""
    # Arguments as of ``ragged_attention``, checked. ValueError if there is no kernel for these sizes or dtypes.
    query, key, value = map(inner_contiguous, (query, key, value))
    (tokens, heads, head_dim), value_dim = query.shape, value.shape[2]
    if query.dtype not in DTYPES:
        raise ValueError(f"ragged_attention: no kernel for {query.dtype}; use torch.bfloat16 or torch.float16")
    if (missing := missing_expanded(head_dim, value_dim)) is not None:
        raise ValueError(f"ragged_attention: {missing}")
    rows, tiling = len(qo_indptr) - 1, tiling or ragged_tiling(head_dim, value_dim)
    if not out.numel() or not rows:
        return
    main, rest = head_parts(head_dim)
    _ragged_attention[(heads, tokens // tiling.queries + rows)](
        query, key, value, qo_indptr, out, lse, *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], rows,
        scale * math.log2(math.e), GROUP=heads // key.shape[1], HEAD=head_dim, VALUE=value_dim, MAIN=main, REST=rest,
        PADDED=max(16, triton.next_power_of_2(value_dim)), QUERIES=tiling.queries, KEYS=tiling.keys,
        STAGES=tiling.stages, num_warps=tiling.warps,
    )  # fmt: skip
