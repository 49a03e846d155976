"""Triton kernels of the gated delta rule over chunks of a row's tokens, for prompts.

What tokens of a chunk correct follows from the state before it by a triangular system of equations, whose matrix does
not depend on the state. So one kernel inverts the matrices of all chunks at once, and a second one walks over the
chunks of a row with some columns of a head's state.

With G the sum of decays up to a token, r what makes a key's length 1, and A the matrix of ``beta * key @ key.T`` with
what decays in between, for tokens before::

    M = (I + A) ** -1
    W, U = M @ (beta * exp(G) * key), M @ (beta * value)
    corrections = U - W @ S
    out = exp(G) * query @ S + (query @ key.T, decayed, for tokens up to each) @ corrections
    S = exp(G_last) * S + (exp(G_last - G) * key).T @ corrections

Shapes: T packed tokens, K heads of queries and keys, H heads of values, D size of a key, V size of a value, B rows, C
chunks, L tokens of a chunk.

Source: Gated Delta Networks (https://arxiv.org/abs/2412.06464), section 3.3.
"""

# Kernels are Triton's objects, not the functions that a type checker sees.
# pyright: reportIndexIssue=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_llm_ops.contracts import GatedDeltaRule
from compiled_llm_ops.kernels.recurrent.chunking import CHUNK, ChunkTiling, chunk_tiling, chunks_of
from compiled_llm_ops.kernels.recurrent.chunks import chunk_of, log_factors, unit_inverse
from compiled_llm_ops.kernels.recurrent.delta_rule import TINY


class Chunks(NamedTuple):
    """What the first kernel hands to the second one; not initialised where there is no chunk.

    Numbers that are multiplied have 16 bits with bfloat16, and 32 else: float16 ends at 65504, which keys that are
    short before they are normalized can reach.

    Attributes:
        w: ``[C, H, L, D]``.
        u: ``[C, H, L, V]``.
        attention: ``[C, H, L, L]``, how much of each correction an output has.
        factors: ``[C, H, 3, L]`` float32: on queries, on corrections, and at the first place on the state.
    """

    w: Tensor
    u: Tensor
    attention: Tensor
    factors: Tensor

    @classmethod
    def of(cls, args: GatedDeltaRule) -> Chunks:
        """Return room for those of the arguments."""
        (count, _, size), (_, heads, value_size) = args.query.shape, args.value.shape
        dtype = torch.bfloat16 if args.query.dtype == torch.bfloat16 else torch.float32
        own = chunks_of(count, len(args.read)), heads
        w, u, attention = (args.query.new_empty(*own, CHUNK, last, dtype=dtype) for last in (size, value_size, CHUNK))
        return cls(w, u, attention, args.query.new_empty(*own, 3, CHUNK, dtype=torch.float32))


# Numbers of tokens and rows change from prompt to prompt: none of them makes another kernel.
@triton.jit(do_not_specialize=["count", "rows"])
def _prepare_chunks(
    query, key, value, decay, beta, qo_indptr, w, u, attention, factors, out,
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
        own = (tile.to(tl.int64) * heads + head) * CHUNK
        mixed = of_queries * (of_query[:, None] * between)
        tl.store(attention + own * CHUNK + offs[:, None] * CHUNK + offs[None, :], mixed.to(attention.dtype.element_ty))
        lower = tl.where(offs[:, None] > offs[None, :], of_keys * ((rate * of_key)[:, None] * between), 0.0)
        inverse = unit_inverse(lower, CHUNK, "tf32x3") * rate[None, :]
        tl.store(factors + own * 3 + offs, tl.exp(total) * of_query)
        tl.store(factors + own * 3 + CHUNK + offs, tl.exp(last - total) * of_key)
        tl.store(factors + own * 3 + 2 * CHUNK, tl.exp(last))
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


@triton.jit
def write_zeros(
    out, tile, head, total, count, heads, VALUE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write zeros for padding among the tokens of this number: not a row's chunk, but L of all."""
    if (tile + 1) * CHUNK > total:
        at, columns = tile * CHUNK + tl.arange(0, CHUNK), tl.arange(0, BLOCK)
        padding = (at >= total) & (at < count)
        for start in tl.static_range(0, VALUE, BLOCK):
            tl.store(
                out + (at.to(tl.int64) * heads + head)[:, None] * VALUE + (start + columns)[None, :],
                tl.zeros([CHUNK, BLOCK], out.dtype.element_ty),
                mask=padding[:, None] & (start + columns < VALUE)[None, :],
            )


@triton.jit
def _walk_over_chunks(
    query, key, w, u, attention, factors, states, qo_indptr, read, write, out,
    query_stride, query_head, query_step, key_stride, key_head, key_step,
    GROUP: tl.constexpr, SIZE: tl.constexpr, VALUE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Walk over the chunks of a row with some columns of a head's state."""
    row, head = tl.program_id(2), tl.program_id(1)
    heads = tl.num_programs(1)
    begin, end = tl.load(qo_indptr + row), tl.load(qo_indptr + row + 1)
    if begin < end:
        offs, offs_d = tl.arange(0, CHUNK), tl.arange(0, BLOCK)
        columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        in_key, in_value = (offs_d < SIZE)[None, :], (columns < VALUE)[None, :]
        before, after = tl.load(read + row).to(tl.int64), tl.load(write + row).to(tl.int64)
        places = offs_d[:, None] * VALUE + columns[None, :]
        both = (offs_d < SIZE)[:, None] & in_value
        state = tl.load(
            states + (before * heads + head) * (SIZE * VALUE) + places, mask=both & (before >= 0), other=0.0
        )
        first_tile = begin // CHUNK + row
        for number in range((end - begin + CHUNK - 1) // CHUNK):
            own = ((first_tile + number).to(tl.int64) * heads + head) * CHUNK
            at = begin + number * CHUNK + offs
            live, at = at < end, at.to(tl.int64)
            w_own = tl.load(w + own * SIZE + offs[:, None] * SIZE + offs_d[None, :], mask=in_key, other=0.0)
            u_own = tl.load(u + own * VALUE + offs[:, None] * VALUE + columns[None, :], mask=in_value, other=0.0)
            mixes = tl.load(attention + own * CHUNK + offs[:, None] * CHUNK + offs[None, :])
            q = tl.load(
                query + at[:, None] * query_stride + (head // GROUP) * query_head + offs_d[None, :] * query_step,
                mask=live[:, None] & in_key,
                other=0.0,
            ).to(w.dtype.element_ty)
            k = tl.load(
                key + at[:, None] * key_stride + (head // GROUP) * key_head + offs_d[None, :] * key_step,
                mask=live[:, None] & in_key,
                other=0.0,
            ).to(w.dtype.element_ty)
            on_query, on_correction = (
                tl.load(factors + own * 3 + offs),
                tl.load(factors + own * 3 + CHUNK + offs),
            )
            rounded = state.to(w.dtype.element_ty)
            correction = u_own.to(tl.float32) - tl.dot(w_own, rounded, input_precision=PRECISION)
            mixed = tl.dot(q, rounded, input_precision=PRECISION) * on_query[:, None]
            mixed = tl.dot(mixes, correction.to(w.dtype.element_ty), mixed, input_precision=PRECISION)
            added = (correction * on_correction[:, None]).to(w.dtype.element_ty)
            state = tl.dot(
                tl.trans(k), added, state * tl.load(factors + own * 3 + 2 * CHUNK), input_precision=PRECISION
            )
            tl.store(
                out + (at * heads + head)[:, None] * VALUE + columns[None, :],
                mixed.to(out.dtype.element_ty),
                mask=live[:, None] & in_value,
            )
        tl.store(states + (after * heads + head) * (SIZE * VALUE) + places, state, mask=both & (after >= 0))


def apply_in_chunks(args: GatedDeltaRule, out: Tensor, tiling: ChunkTiling | None = None) -> None:
    """Launch both on the current device.

    Args:
        args: as of ``gated_delta_rule``, checked, with a decay of each head and D of ``LARGEST_KEY`` at most.
        out: ``[T, H, V]``, contiguous, written.
        tiling: None for the one of ``chunk_tiling``. Bits do not depend on it.
    """
    (_, key_heads, size), (count, heads, value_size), rows = args.query.shape, args.value.shape, len(args.read)
    if not rows or not count:
        return
    chunks = Chunks.of(args)
    if tiling is None:
        tiling = chunk_tiling(rows * heads, size, value_size, chunks.w.element_size())
    shapes = {"GROUP": heads // key_heads, "SIZE": size, "VALUE": value_size, "CHUNK": CHUNK}
    precision = "tf32x3" if args.query.dtype == torch.float32 else "tf32"
    _prepare_chunks[(len(chunks.w), heads)](
        args.query, args.key, args.value, args.decay, args.beta, args.qo_indptr, *chunks, out,
        *args.query.stride(), *args.key.stride(), *args.value.stride(), *args.decay.stride(), *args.beta.stride(),
        args.scale, count, rows, **shapes, BLOCK=min(64, max(16, triton.next_power_of_2(max(size, value_size)))),
        NORMALIZE=args.normalize, PRECISION=precision, num_warps=4 if chunks.w.element_size() == 2 else 8,
    )  # fmt: skip
    _walk_over_chunks[(triton.cdiv(value_size, tiling.columns), heads, rows)](
        args.query, args.key, *chunks, args.states, args.qo_indptr, args.read, args.write, out,
        *args.query.stride(), *args.key.stride(), **shapes, BLOCK=max(16, triton.next_power_of_2(size)),
        COLUMNS=tiling.columns, PRECISION=precision, num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
