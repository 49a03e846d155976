"""A Triton kernel of the gated delta rule: a program walks over the tokens of a row with a part of a head's state."""

# Shapes: T packed tokens, K heads of queries and keys, H heads of values, D size of a key, V size of a value, B rows.

# Kernels are Triton's objects, not the functions that a type checker sees.
# pyright: reportIndexIssue=false, reportFunctionMemberAccess=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from compiled_llm_ops.kernels.attention.launching import with_whole_heads
from compiled_llm_ops.recurrent.contracts import GatedDeltaRule

VALUES = 32  # columns of the state that a program has: with keys of 128 numbers, 32 registers of a thread
TINY = tl.constexpr(1e-6)

WARPS_OF_A_WALK = 1
"""With ``invariant``, where prompts are walked, too: threads of one warp need not wait for those of others."""
# On an H200 with 32 heads and keys of 128 numbers, 8 rows of 512 tokens took 745 microseconds with one warp, and 1,946
# with four; one row of 512 tokens 498 and 633, and 256 rows of one token 289 and 302.


@triton.jit
def _gated_delta_rule(
    query, key, value, decay, beta, states, qo_indptr, read, write, out,
    query_stride, query_head, query_step, key_stride, key_head, key_step, value_stride, value_head, value_step,
    decay_stride, decay_head, decay_step, beta_stride, beta_head, scale, count,
    GROUP: tl.constexpr, SIZE: tl.constexpr, VALUE: tl.constexpr, BLOCK: tl.constexpr, VALUES: tl.constexpr,
    OF_CHANNELS: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(2), tl.program_id(1)
    heads = tl.num_programs(1)
    offs, columns = tl.arange(0, BLOCK), tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    mask, column_mask = offs < SIZE, columns < VALUE
    begin, end = tl.load(qo_indptr + row), tl.load(qo_indptr + row + 1)
    before, after = tl.load(read + row).to(tl.int64), tl.load(write + row).to(tl.int64)
    places = offs[:, None] * VALUE + columns[None, :]
    both = mask[:, None] & column_mask[None, :]
    state = tl.load(states + (before * heads + head) * (SIZE * VALUE) + places, mask=both & (before >= 0), other=0.0)
    at = begin.to(tl.int64)
    for _ in range(begin, end):
        q = tl.load(query + at * query_stride + (head // GROUP) * query_head + offs * query_step, mask=mask, other=0.0)
        k = tl.load(key + at * key_stride + (head // GROUP) * key_head + offs * key_step, mask=mask, other=0.0)
        v = tl.load(value + at * value_stride + head * value_head + columns * value_step, mask=column_mask, other=0.0)
        q, k, v = q.to(tl.float32), k.to(tl.float32), v.to(tl.float32)
        if NORMALIZE:
            q *= tl.rsqrt(tl.sum(q * q, 0) + TINY)
            k *= tl.rsqrt(tl.sum(k * k, 0) + TINY)
        faded = decay + at * decay_stride + head * decay_head
        if OF_CHANNELS:
            state *= tl.exp(tl.load(faded + offs * decay_step, mask=mask, other=0.0).to(tl.float32))[:, None]
        else:
            state *= tl.exp(tl.load(faded).to(tl.float32))
        rate = tl.load(beta + at * beta_stride + head * beta_head).to(tl.float32)
        correction = rate * (v - tl.sum(state * k[:, None], 0))
        state += k[:, None] * correction[None, :]
        result = tl.sum(state * (q * scale)[:, None], 0)
        tl.store(out + (at * heads + head) * VALUE + columns, result.to(out.dtype.element_ty), mask=column_mask)
        at += 1
    if row == tl.num_programs(2) - 1:
        for _ in range(end, count):  # padding
            nothing = tl.zeros([VALUES], out.dtype.element_ty)
            tl.store(out + (at * heads + head) * VALUE + columns, nothing, mask=column_mask)
            at += 1
    keeps = (after >= 0) & (begin < end)
    tl.store(states + (after * heads + head) * (SIZE * VALUE) + places, state, mask=both & keeps)


# One kernel for all batches. Other strides and addresses would make others of it, which may add in another order.
_invariant_delta_rule = triton.jit(
    do_not_specialize=[
        *("query_stride", "query_head", "key_stride", "key_head", "value_stride", "value_head"),
        *("decay_stride", "decay_head", "beta_stride", "beta_head", "count"),
    ],
    do_not_specialize_on_alignment=["query", "key", "value", "decay", "beta", "qo_indptr", "read", "write"],
)(_gated_delta_rule.fn)


def apply(args: GatedDeltaRule, out: Tensor) -> None:
    """Launch it on the current device; arguments as of ``gated_delta_rule``, checked, and ``out`` ``[T, H, V]``."""
    kernel, (query, key, value) = _gated_delta_rule, args[:3]
    (_, key_heads, size), (count, heads, value_size), rows = args.query.shape, args.value.shape, len(args.read)
    of_channels = args.decay.dim() == 3
    decay = args.decay if of_channels else args.decay[..., None]
    if args.invariant:
        kernel, (query, key, value, decay) = _invariant_delta_rule, with_whole_heads(query, key, value, decay)
    columns = min(VALUES, triton.next_power_of_2(value_size))
    if rows:
        kernel[(triton.cdiv(value_size, columns), heads, rows)](
            query, key, value, decay, args.beta, args.states, args.qo_indptr, args.read, args.write, out,
            *query.stride(), *key.stride(), *value.stride(), *decay.stride(), *args.beta.stride(),
            args.scale, count, GROUP=heads // key_heads, SIZE=size, VALUE=value_size,
            BLOCK=triton.next_power_of_2(size), VALUES=columns,
            OF_CHANNELS=of_channels, NORMALIZE=args.normalize,
            num_warps=WARPS_OF_A_WALK if args.invariant else 4,
            enable_fp_fusion=not args.invariant,
        )  # fmt: skip
