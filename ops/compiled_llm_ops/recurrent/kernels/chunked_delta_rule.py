"""Triton kernels of the gated delta rule over chunks of a row's tokens, for prompts."""

# What tokens of a chunk correct follows from the state before it by a triangular system of equations, whose matrix does
# not depend on the state. So one kernel inverts the matrices of all chunks at once, and a second one walks over the
# chunks of a row with some columns of a head's state.
# With G the sum of decays up to a token, r what makes a key's length 1, and A the matrix of ``beta * key @ key.T`` with
# what decays in between, for tokens before:
#     M = (I + A) ** -1
#     W, U = M @ (beta * exp(G) * key), M @ (beta * value)
#     corrections = U - W @ S
#     out = exp(G) * query @ S + (query @ key.T, decayed, for tokens up to each) @ corrections
#     S = exp(G_last) * S + (exp(G_last - G) * key).T @ corrections
# Shapes: T packed tokens, K heads of queries and keys, H heads of values, D size of a key, V size of a value, B rows, C
# chunks, L tokens of a chunk.
# Source: Gated Delta Networks (https://arxiv.org/abs/2412.06464), section 3.3.

# Kernels are Triton's objects, not the functions that a type checker sees.
# pyright: reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_llm_ops.recurrent.contracts import GatedDeltaRule
from compiled_llm_ops.recurrent.kernels.chunk_walk import ChunkedTokens, Chunks, multiplied_in, walk, write_zeros
from compiled_llm_ops.recurrent.kernels.chunking import CHUNK, ChunkTiling, chunk_tiling
from compiled_llm_ops.recurrent.kernels.chunks import chunk_of, log_factors, unit_inverse
from compiled_llm_ops.recurrent.kernels.delta_rule import TINY


# Numbers of tokens and rows change from prompt to prompt: none of them makes another kernel.
@triton.jit(do_not_specialize=["count", "rows"])
def _prepare_delta_rule(
    query, key, value, decay, beta, qo_indptr,
    w, u, attention, on_query, on_value, kept, out,
    query_stride, query_head, query_step, key_stride, key_head, key_step, value_stride, value_head, value_step,
    decay_stride, decay_head, beta_stride, beta_head, scale, count, rows,
    GROUP: tl.constexpr, SIZE: tl.constexpr, VALUE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    NORMALIZE: tl.constexpr, PRECISION: tl.constexpr,
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
        values = value + at[:, None] * value_stride + head * value_head + columns[None, :] * value_step
        of_keys, of_queries = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
        key_length, query_length = tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK], tl.float32)
        for start in tl.static_range(0, SIZE, BLOCK):
            mask = live[:, None] & (start + columns < SIZE)[None, :]
            k = tl.load(keys + start * key_step, mask=mask, other=0.0).to(w.dtype.element_ty)
            q = tl.load(queries + start * query_step, mask=mask, other=0.0).to(w.dtype.element_ty)
            of_keys = tl.dot(k, tl.trans(k), of_keys, input_precision=PRECISION)
            of_queries = tl.dot(q, tl.trans(k), of_queries, input_precision=PRECISION)
            if NORMALIZE:
                key_length += tl.sum(k.to(tl.float32) * k.to(tl.float32), 1)
                query_length += tl.sum(q.to(tl.float32) * q.to(tl.float32), 1)
        # Lengths are put into factors of rows, so that no key or query is rounded once more.
        of_key, of_query = tl.full([CHUNK], 1.0, tl.float32), tl.full([CHUNK], 1.0, tl.float32) * scale
        if NORMALIZE:
            of_key, of_query = tl.rsqrt(key_length + TINY), tl.rsqrt(query_length + TINY) * scale
        total = tl.cumsum(log_factors(tl.load(decay + at * decay_stride + head * decay_head, mask=live, other=0.0)), 0)
        rate = tl.load(beta + at * beta_stride + head * beta_head, mask=live, other=0.0).to(tl.float32)
        last = tl.sum(tl.where(offs == CHUNK - 1, total, 0.0), 0)
        # Not the quotient of two exponentials: each could be too large, or 0, where their quotient is neither.
        seen = offs[:, None] >= offs[None, :]
        between = tl.exp(tl.where(seen, total[:, None] - total[None, :], -float("inf"))) * of_key[None, :]
        number = tile.to(tl.int64) * heads + head
        own = number * CHUNK
        mixed = of_queries * (of_query[:, None] * between)
        tl.store(attention + own * CHUNK + offs[:, None] * CHUNK + offs[None, :], mixed.to(attention.dtype.element_ty))
        lower = tl.where(offs[:, None] > offs[None, :], of_keys * ((rate * of_key)[:, None] * between), 0.0)
        inverse = unit_inverse(lower, CHUNK, "tf32x3") * rate[None, :]
        tl.store(on_query + own + offs, tl.exp(total) * of_query)
        tl.store(on_value + own + offs, tl.exp(last - total) * of_key)
        tl.store(kept + number, tl.exp(last))
        of_values = inverse.to(u.dtype.element_ty)
        for start in tl.static_range(0, VALUE, BLOCK):
            inside = (start + columns < VALUE)[None, :]
            v = tl.load(values + start * value_step, mask=live[:, None] & inside, other=0.0).to(u.dtype.element_ty)
            product = tl.dot(of_values, v, input_precision=PRECISION).to(u.dtype.element_ty)
            tl.store(u + own * VALUE + offs[:, None] * VALUE + (start + columns)[None, :], product, mask=inside)
        of_states = (inverse * (tl.exp(total) * of_key)[None, :]).to(w.dtype.element_ty)
        for start in tl.static_range(0, SIZE, BLOCK):
            inside = (start + columns < SIZE)[None, :]
            k = tl.load(keys + start * key_step, mask=live[:, None] & inside, other=0.0).to(w.dtype.element_ty)
            product = tl.dot(of_states, k, input_precision=PRECISION).to(w.dtype.element_ty)
            tl.store(w + own * SIZE + offs[:, None] * SIZE + (start + columns)[None, :], product, mask=inside)


def apply_in_chunks(args: GatedDeltaRule, out: Tensor, tiling: ChunkTiling | None = None) -> None:
    """Launch both into ``out`` ``[T, H, V]``; ``args`` are checked, with a decay of each head; tilings keep bits."""
    # D is ``LARGEST_KEY`` at most.
    (_, key_heads, size), (count, heads, value_size), rows = args.query.shape, args.value.shape, len(args.read)
    if not rows or not count:
        return
    dtype, precision = multiplied_in(args.query)
    attention, on_query, on_value = Chunks.of(args.query, rows, heads, dtype)
    w, u = (attention.new_empty(*attention.shape[:3], last) for last in (size, value_size))
    kept = on_query.new_empty(len(attention), heads, 1)
    _prepare_delta_rule[(len(attention), heads)](
        args.query, args.key, args.value, args.decay, args.beta, args.qo_indptr,
        w, u, attention, on_query, on_value, kept, out,
        *args.query.stride(), *args.key.stride(), *args.value.stride(), *args.decay.stride(), *args.beta.stride(),
        args.scale, count, rows, GROUP=heads // key_heads, SIZE=size, VALUE=value_size, CHUNK=CHUNK,
        BLOCK=min(64, max(16, triton.next_power_of_2(max(size, value_size)))), NORMALIZE=args.normalize,
        PRECISION=precision, num_warps=4 if dtype == torch.bfloat16 else 8,
    )  # fmt: skip
    chunked = ChunkedTokens(
        args.query, args.key, u, w, attention, on_query, on_value, kept, args.states, False, args.qo_indptr,
        args.read, args.write, precision,
    )  # fmt: skip
    tiling = tiling or chunk_tiling(rows * heads, value_size, dtype.itemsize)
    walk(chunked, out, tiling, (key_heads, size, value_size))
