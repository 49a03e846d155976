"""A Triton kernel that walks over the chunks of a row, for the gated delta rule and the selective scan."""

# What does not depend on the state was computed for all chunks before. A program has some columns of a head's state S,
# and of each chunk computes:
#     values = values - W @ S                       (the delta rule's corrections)
#     out = on_query * (query @ S) + attention @ values
#     S = kept * S + key.T @ (on_value * values)
# Shapes: T packed tokens, K heads of queries and keys, H heads of values, D size of a key, V size of a value, B rows, C
# chunks, L tokens of a chunk, E entries.

# Kernels are Triton's objects, not the functions that a type checker sees.
# pyright: reportIndexIssue=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_llm_ops.recurrent.kernels.chunking import CHUNK, ChunkTiling, chunks_of


class ChunkedTokens(NamedTuple):
    """What the walk reads and writes."""

    # Products are of numbers in the type of ``attention``: bfloat16 if all that was given has it, and else float32,
    # since float16 ends at 65504.

    query: Tensor  # ``[T, K, D]``, any strides; or ``[C, H, L, D]``, contiguous
    key: Tensor  # likewise, as the query
    value: Tensor  # ``[T, H, V]``, any strides; or ``[C, H, L, V]``, contiguous, with ``w``
    w: Tensor | None  # ``[C, H, L, D]``, contiguous; None if nothing is corrected
    attention: Tensor  # ``[C, H, L, L]``, contiguous: how much of each value an output has
    on_query: Tensor | None  # ``[C, H, L]`` float32, contiguous; None for 1
    on_value: Tensor | None  # ``[C, H, L]`` float32, contiguous; None for 1
    kept: Tensor  # ``[C, H, 1 or D]`` float32, contiguous: what is left of a state after a chunk
    states: Tensor  # ``[E, H, D, V]`` float32, contiguous; ``[E, H, V, D]`` if ``transposed``
    transposed: bool  # whether states are
    qo_indptr: Tensor  # ``[B + 1]`` int32
    read: Tensor  # ``[B]`` int32, as of the ops
    write: Tensor  # ``[B]`` int32, as of the ops
    precision: str  # of products of float32


class Chunks(NamedTuple):
    """Room for what is computed of each chunk; not initialised where there is none."""

    attention: Tensor  # ``[C, H, L, L]``
    on_query: Tensor  # ``[C, H, L]`` float32
    on_value: Tensor  # ``[C, H, L]`` float32

    @classmethod
    def of(cls, given: Tensor, rows: int, heads: int, dtype: torch.dtype) -> Chunks:
        """Return room for those of packed tokens ``[T, ...]`` on their device."""
        own = chunks_of(len(given), rows), heads, CHUNK
        factors = (given.new_empty(own, dtype=torch.float32) for _ in range(2))
        return cls(given.new_empty(*own, CHUNK, dtype=dtype), *factors)


def multiplied_in(*tensors: Tensor) -> tuple[torch.dtype, str]:
    """Return the type that numbers are multiplied in, and the precision of products of float32."""
    types = {tensor.dtype for tensor in tensors}
    if types == {torch.bfloat16}:
        return torch.bfloat16, "tf32"  # which is not asked for
    # TF32 has as many bits of a fraction as float16.
    return torch.float32, "tf32x3" if torch.float32 in types else "tf32"


@triton.jit
def _walk_over_chunks(
    query, key, value, w, attention, on_query, on_value, kept, states, qo_indptr, read, write, out,
    query_stride, query_head, query_step, key_stride, key_head, key_step, value_stride, value_head, value_step,
    GROUP: tl.constexpr, SIZE: tl.constexpr, VALUE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr, TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Walk over the chunks of a row with some columns of a head's state."""
    # Without ``on_query`` and ``on_value``, queries and keys are those of chunks, and with ``w`` values are.
    row, head = tl.program_id(2), tl.program_id(1)
    heads = tl.num_programs(1)
    begin, end = tl.load(qo_indptr + row), tl.load(qo_indptr + row + 1)
    if begin < end:
        offs, offs_d = tl.arange(0, CHUNK), tl.arange(0, BLOCK)
        columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        in_key, in_value = (offs_d < SIZE)[None, :], (columns < VALUE)[None, :]
        before, after = tl.load(read + row).to(tl.int64), tl.load(write + row).to(tl.int64)
        places = offs_d[:, None] * (1 if TRANSPOSED else VALUE) + columns[None, :] * (SIZE if TRANSPOSED else 1)
        both = (offs_d < SIZE)[:, None] & in_value
        state = tl.load(
            states + (before * heads + head) * (SIZE * VALUE) + places, mask=both & (before >= 0), other=0.0
        )
        first_tile = begin // CHUNK + row
        for number in range((end - begin + CHUNK - 1) // CHUNK):
            own = (first_tile + number).to(tl.int64) * heads + head
            at, of_chunk = begin + number * CHUNK + offs, own * CHUNK + offs
            live, at = at < end, at.to(tl.int64)
            if on_query is None:
                q = tl.load(query + of_chunk[:, None] * SIZE + offs_d[None, :], mask=in_key, other=0.0)
                k = tl.load(key + of_chunk[:, None] * SIZE + offs_d[None, :], mask=in_key, other=0.0)
            else:
                q = tl.load(
                    query + at[:, None] * query_stride + (head // GROUP) * query_head + offs_d[None, :] * query_step,
                    mask=live[:, None] & in_key,
                    other=0.0,
                )
                k = tl.load(
                    key + at[:, None] * key_stride + (head // GROUP) * key_head + offs_d[None, :] * key_step,
                    mask=live[:, None] & in_key,
                    other=0.0,
                )
            mixes = tl.load(attention + of_chunk[:, None] * CHUNK + offs[None, :])
            rounded = state.to(mixes.dtype)
            if w is None:
                v = tl.load(
                    value + at[:, None] * value_stride + head * value_head + columns[None, :] * value_step,
                    mask=live[:, None] & in_value,
                    other=0.0,
                )
                values = v.to(tl.float32)
            else:
                w_own = tl.load(w + of_chunk[:, None] * SIZE + offs_d[None, :], mask=in_key, other=0.0)
                u_own = tl.load(value + of_chunk[:, None] * VALUE + columns[None, :], mask=in_value, other=0.0)
                values = u_own.to(tl.float32) - tl.dot(w_own, rounded, input_precision=PRECISION)
            mixed = tl.dot(q.to(mixes.dtype), rounded, input_precision=PRECISION)
            if on_query is not None:
                mixed *= tl.load(on_query + of_chunk)[:, None]
            mixed = tl.dot(mixes, values.to(mixes.dtype), mixed, input_precision=PRECISION)
            if on_value is None:
                state *= tl.load(kept + own * SIZE + offs_d, mask=offs_d < SIZE, other=0.0)[:, None]
            else:
                values *= tl.load(on_value + of_chunk)[:, None]
                state *= tl.load(kept + own)
            state = tl.dot(tl.trans(k.to(mixes.dtype)), values.to(mixes.dtype), state, input_precision=PRECISION)
            tl.store(
                out + (at * heads + head)[:, None] * VALUE + columns[None, :],
                mixed.to(out.dtype.element_ty),
                mask=live[:, None] & in_value,
            )
        tl.store(states + (after * heads + head) * (SIZE * VALUE) + places, state, mask=both & (after >= 0))


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


def walk(args: ChunkedTokens, out: Tensor, tiling: ChunkTiling, sizes: tuple[int, int, int]) -> None:
    """Launch it into ``out`` ``[T, H, V]``, contiguous, but for padding; bits do not depend on ``tiling``."""
    key_heads, size, value_size = sizes
    heads = out.shape[1]
    _walk_over_chunks[(triton.cdiv(value_size, tiling.columns), heads, len(args.read))](
        args.query, args.key, args.value, args.w, args.attention, args.on_query, args.on_value, args.kept, args.states,
        args.qo_indptr, args.read, args.write, out,
        *_strides(args.query), *_strides(args.key), *_strides(args.value),
        GROUP=heads // key_heads, SIZE=size, VALUE=value_size, CHUNK=CHUNK,
        BLOCK=max(16, triton.next_power_of_2(size)), COLUMNS=tiling.columns, TRANSPOSED=args.transposed,
        PRECISION=args.precision, num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """Return those of packed tokens; of chunks they are known."""
    return tensor.stride() if tensor.dim() == 3 else (1, 1, 1)
