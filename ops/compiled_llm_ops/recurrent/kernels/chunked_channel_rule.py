"""Triton kernels of the delta rule with a decay of each channel (Kimi Linear), over chunks of a row's tokens."""

# As in ``chunked_delta_rule``, with decays ``[L, D]`` that are put into keys and queries. What decays between two
# tokens is the quotient of two exponentials, each of which may be too large for a float. So decays are taken relative
# to a token between both: for tokens of two blocks next to each other, the last one of the first block. Both factors
# are at most 1 then. A block and the next one are halves of a block twice as large, of 2 tokens up to all of a chunk,
# and each pair of tokens is in two halves of one of them.
# Shapes: T packed tokens, K heads of queries and keys, H heads of values, D size of a key, V size of a value, B rows, C
# chunks, L tokens of a chunk.
# Source: Kimi Linear (https://arxiv.org/abs/2510.26692), section 3, but for these blocks.

# Kernels are Triton's objects, not the functions that a type checker sees.
# pyright: reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_llm_ops.recurrent.contracts import GatedDeltaRule
from compiled_llm_ops.recurrent.kernels.chunk_walk import ChunkedTokens, multiplied_in, walk, write_zeros
from compiled_llm_ops.recurrent.kernels.chunking import CHUNK, ChunkTiling, chunk_tiling, chunks_of
from compiled_llm_ops.recurrent.kernels.chunks import chunk_of, log_factors, unit_inverse
from compiled_llm_ops.recurrent.kernels.delta_rule import TINY


# Numbers of tokens and rows change from prompt to prompt: none of them makes another kernel.
@triton.jit(do_not_specialize=["count", "rows"])
def _prepare_channel_rule(
    query, key, value, decay, beta, qo_indptr, w, u, attention, folded_query, folded_key, kept, out,
    query_stride, query_head, query_step, key_stride, key_head, key_step, value_stride, value_head, value_step,
    decay_stride, decay_head, decay_step, beta_stride, beta_head, scale, count, rows,
    GROUP: tl.constexpr, SIZE: tl.constexpr, VALUE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    LEVELS: tl.constexpr, NORMALIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute what does not depend on the state, of one chunk and head."""
    tile, head = tl.program_id(0), tl.program_id(1)
    heads = tl.num_programs(1)
    write_zeros(out, tile, head, tl.load(qo_indptr + rows), count, heads, VALUE, CHUNK, BLOCK)
    first, end = chunk_of(tile, qo_indptr, rows, CHUNK)
    if first < end:
        offs, columns = tl.arange(0, CHUNK), tl.arange(0, BLOCK)
        live, at = first + offs < end, (first + offs).to(tl.int64)
        queries = query + at[:, None] * query_stride + (head // GROUP) * query_head + columns[None, :] * query_step
        keys = key + at[:, None] * key_stride + (head // GROUP) * key_head + columns[None, :] * key_step
        decays = decay + at[:, None] * decay_stride + head * decay_head + columns[None, :] * decay_step
        values = value + at[:, None] * value_stride + head * value_head + columns[None, :] * value_step
        of_keys, of_queries = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
        key_length, query_length = tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK], tl.float32)
        own_products = tl.zeros([CHUNK], tl.float32)
        for start in range(0, SIZE, BLOCK):
            mask = live[:, None] & (start + columns < SIZE)[None, :]
            k = tl.load(keys + start * key_step, mask=mask, other=0.0).to(tl.float32)
            q = tl.load(queries + start * query_step, mask=mask, other=0.0).to(tl.float32)
            total = tl.cumsum(log_factors(tl.load(decays + start * decay_step, mask=mask, other=0.0)), 0)
            key_length += tl.sum(k * k, 1)
            query_length += tl.sum(q * q, 1)
            own_products += tl.sum(q * k, 1)
            for level in range(LEVELS):
                # One of two tokens is in the first half of a block, and the other one in its second half.
                half = offs >> level
                middle = tl.broadcast_to(((half // 2 * 2 + 1) << level)[:, None] - 1, [CHUNK, BLOCK])
                factor = tl.exp(-tl.abs(total - tl.gather(total, middle, 0)))
                right, left = (k * factor).to(w.dtype.element_ty), (q * factor).to(w.dtype.element_ty)
                pair = (half[:, None] == half[None, :] + 1) & (half[:, None] % 2 == 1)
                products = tl.dot(right, tl.trans(right), input_precision=PRECISION)
                of_keys += tl.where(pair, products, 0.0)
                products = tl.dot(left, tl.trans(right), input_precision=PRECISION)
                of_queries += tl.where(pair, products, 0.0)
        of_key, of_query = tl.full([CHUNK], 1.0, tl.float32), tl.full([CHUNK], 1.0, tl.float32) * scale
        if NORMALIZE:
            of_key, of_query = tl.rsqrt(key_length + TINY), tl.rsqrt(query_length + TINY) * scale
        rate = tl.load(beta + at * beta_stride + head * beta_head, mask=live, other=0.0).to(tl.float32)
        number = tile.to(tl.int64) * heads + head
        own = number * CHUNK
        of_queries += tl.where(offs[:, None] == offs[None, :], own_products[:, None], 0.0)
        of_queries *= of_query[:, None] * of_key[None, :]
        tl.store(
            attention + own * CHUNK + offs[:, None] * CHUNK + offs[None, :],
            of_queries.to(attention.dtype.element_ty),
        )
        inverse = unit_inverse(of_keys * ((rate * of_key)[:, None] * of_key[None, :]), CHUNK, "tf32x3")
        inverse = (inverse * rate[None, :]).to(w.dtype.element_ty)
        for start in range(0, VALUE, BLOCK):
            inside = (start + columns < VALUE)[None, :]
            v = tl.load(values + start * value_step, mask=live[:, None] & inside, other=0.0).to(u.dtype.element_ty)
            product = tl.dot(inverse, v, input_precision=PRECISION).to(u.dtype.element_ty)
            tl.store(u + own * VALUE + offs[:, None] * VALUE + (start + columns)[None, :], product, mask=inside)
        for start in range(0, SIZE, BLOCK):
            inside = (start + columns < SIZE)[None, :]
            mask = live[:, None] & inside
            k = tl.load(keys + start * key_step, mask=mask, other=0.0).to(tl.float32) * of_key[:, None]
            q = tl.load(queries + start * query_step, mask=mask, other=0.0).to(tl.float32) * of_query[:, None]
            total = tl.cumsum(log_factors(tl.load(decays + start * decay_step, mask=mask, other=0.0)), 0)
            last = tl.sum(tl.where((offs == CHUNK - 1)[:, None], total, 0.0), 0)
            grown = (k * tl.exp(total)).to(w.dtype.element_ty)
            product = tl.dot(inverse, grown, input_precision=PRECISION).to(w.dtype.element_ty)
            places = own * SIZE + offs[:, None] * SIZE + (start + columns)[None, :]
            tl.store(w + places, product, mask=inside)
            tl.store(folded_query + places, (q * tl.exp(total)).to(w.dtype.element_ty), mask=inside)
            tl.store(folded_key + places, (k * tl.exp(last[None, :] - total)).to(w.dtype.element_ty), mask=inside)
            tl.store(kept + number * SIZE + start + columns, tl.exp(last), mask=start + columns < SIZE)


def apply_channels_in_chunks(args: GatedDeltaRule, out: Tensor, tiling: ChunkTiling | None = None) -> None:
    """Launch both into ``out`` ``[T, H, V]``; ``args`` are checked, with a decay of each channel; tilings keep bits."""
    # D is ``LARGEST_KEY`` at most.
    (_, key_heads, size), (count, heads, value_size), rows = args.query.shape, args.value.shape, len(args.read)
    if not rows or not count:
        return
    dtype, precision = multiplied_in(args.query)
    attention = args.query.new_empty(chunks_of(count, rows), heads, CHUNK, CHUNK, dtype=dtype)
    w, query, key, u = (attention.new_empty(*attention.shape[:3], last) for last in (*[size] * 3, value_size))
    kept = attention.new_empty(*attention.shape[:2], size, dtype=torch.float32)
    _prepare_channel_rule[(len(attention), heads)](
        args.query, args.key, args.value, args.decay, args.beta, args.qo_indptr,
        w, u, attention, query, key, kept, out,
        *args.query.stride(), *args.key.stride(), *args.value.stride(), *args.decay.stride(), *args.beta.stride(),
        args.scale, count, rows, GROUP=heads // key_heads, SIZE=size, VALUE=value_size, CHUNK=CHUNK,
        BLOCK=min(32, max(16, triton.next_power_of_2(max(size, value_size)))), LEVELS=CHUNK.bit_length() - 1,
        NORMALIZE=args.normalize, PRECISION=precision, num_warps=8 if precision == "tf32x3" else 4,
        num_stages=1,
    )  # fmt: skip
    chunked = ChunkedTokens(
        query, key, u, w, attention, None, None, kept, args.states, False, args.qo_indptr, args.read, args.write,
        precision,
    )  # fmt: skip
    tiling = tiling or chunk_tiling(rows * heads, value_size, dtype.itemsize)
    walk(chunked, out, tiling, (key_heads, size, value_size))
