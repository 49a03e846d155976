"""Triton kernels of the selective scan with one decay of each head, over chunks of a row's tokens, for prompts."""

# With L the sum of ``dt * a`` up to a token, a chunk's results are those of attention whose weights decay, and what the
# state before it gives. So one kernel computes the weights of all chunks at once, and a second one walks over the
# chunks of a row:
#     attention = c @ b.T * exp(L - L.T) * dt.T     (for tokens up to each)
#     out = exp(L) * c @ S.T + attention @ tokens
#     S = exp(L_last) * S + (exp(L_last - L) * dt * tokens).T @ b
# Shapes: T packed tokens, H heads, P size of a head, N size of a state, G groups of heads, B rows, C chunks, L tokens
# of a chunk.
# Source: Mamba 2 (https://arxiv.org/abs/2405.21060), section 6.

# Kernels are Triton's objects, not the functions that a type checker sees.
# pyright: reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_llm_ops.recurrent.contracts import SelectiveScan
from compiled_llm_ops.recurrent.kernels.chunk_walk import ChunkedTokens, Chunks, multiplied_in, walk, write_zeros
from compiled_llm_ops.recurrent.kernels.chunking import CHUNK, ChunkTiling, chunk_tiling
from compiled_llm_ops.recurrent.kernels.chunks import chunk_of, log_factors


# Numbers of tokens and rows change from prompt to prompt: none of them makes another kernel.
@triton.jit(do_not_specialize=["count", "rows"])
def _prepare_scan(
    dt, a, b, c, qo_indptr, attention, on_query, on_value, kept, out,
    dt_stride, dt_head, a_head, b_stride, b_group, b_step, c_stride, c_group, c_step, count, rows,
    GROUP: tl.constexpr, SIZE: tl.constexpr, NUMBERS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute what does not depend on the state, of one chunk and head."""
    tile, head = tl.program_id(0), tl.program_id(1)
    heads = tl.num_programs(1)
    write_zeros(out, tile, head, tl.load(qo_indptr + rows), count, heads, SIZE, CHUNK, BLOCK)
    first, end = chunk_of(tile, qo_indptr, rows, CHUNK)
    if first < end:
        offs, columns = tl.arange(0, CHUNK), tl.arange(0, BLOCK)
        live, at = first + offs < end, (first + offs).to(tl.int64)
        into = b + at[:, None] * b_stride + (head // GROUP) * b_group + columns[None, :] * b_step
        outof = c + at[:, None] * c_stride + (head // GROUP) * c_group + columns[None, :] * c_step
        mixes = tl.zeros([CHUNK, CHUNK], tl.float32)
        for start in tl.static_range(0, NUMBERS, BLOCK):
            mask = live[:, None] & (start + columns < NUMBERS)[None, :]
            k = tl.load(into + start * b_step, mask=mask, other=0.0).to(attention.dtype.element_ty)
            q = tl.load(outof + start * c_step, mask=mask, other=0.0).to(attention.dtype.element_ty)
            mixes = tl.dot(q, tl.trans(k), mixes, input_precision=PRECISION)
        step = tl.load(dt + at * dt_stride + head * dt_head, mask=live, other=0.0).to(tl.float32)
        rate = tl.load(a + head * a_head).to(tl.float32)
        total = tl.cumsum(log_factors(tl.where(live, step * rate, 0.0)), 0)
        last = tl.sum(tl.where(offs == CHUNK - 1, total, 0.0), 0)
        # Not the quotient of two exponentials: each could be too large, or 0, where their quotient is neither.
        seen = offs[:, None] >= offs[None, :]
        mixes *= tl.exp(tl.where(seen, total[:, None] - total[None, :], -float("inf"))) * step[None, :]
        own = tile.to(tl.int64) * heads + head
        places = own * (CHUNK * CHUNK) + offs[:, None] * CHUNK + offs[None, :]
        tl.store(attention + places, mixes.to(attention.dtype.element_ty))
        tl.store(on_query + own * CHUNK + offs, tl.exp(total))
        tl.store(on_value + own * CHUNK + offs, tl.exp(last - total) * step)
        tl.store(kept + own, tl.exp(last))


def scan_in_chunks(args: SelectiveScan, out: Tensor, tiling: ChunkTiling | None = None) -> None:
    """Launch both into ``out`` ``[T, H, P]``; ValueError if there is a decay of each number; tilings keep bits."""
    # ``args`` are checked, with N of ``LARGEST_KEY`` at most.
    if args.a.dim() != 1:
        raise ValueError("selective_scan: with a decay of each number of the state, [H, N], there are no chunks")
    (count, heads, size), (_, groups, numbers), rows = args.tokens.shape, args.b.shape, len(args.read)
    if not rows or not count:
        return
    dtype, precision = multiplied_in(args.tokens, args.b, args.c)
    attention, on_query, on_value = Chunks.of(args.tokens, rows, heads, dtype)
    kept = args.tokens.new_empty(len(attention), heads, 1, dtype=torch.float32)
    _prepare_scan[(len(attention), heads)](
        args.dt, args.a, args.b, args.c, args.qo_indptr, attention, on_query, on_value, kept, out,
        *args.dt.stride(), *args.a.stride(), *args.b.stride(), *args.c.stride(), count, rows,
        GROUP=heads // groups, SIZE=size, NUMBERS=numbers, CHUNK=CHUNK,
        BLOCK=min(64, max(16, triton.next_power_of_2(numbers))), PRECISION=precision, num_warps=4,
    )  # fmt: skip
    chunked = ChunkedTokens(
        args.c, args.b, args.tokens, None, attention, on_query, on_value, kept, args.states, True, args.qo_indptr,
        args.read, args.write, precision,
    )  # fmt: skip
    tiling = tiling or chunk_tiling(rows * heads, size, dtype.itemsize)
    walk(chunked, out, tiling, (groups, numbers, size))
