"""A Triton kernel of the selective scan: a program walks over the tokens of a row with the states of some channels."""

# A channel is one of the P numbers of one of H heads.
# Shapes: T packed tokens, H heads, P size of a head, N size of a state, G groups of heads, B rows.

# Kernels are Triton's objects, not the functions that a type checker sees.
# pyright: reportIndexIssue=false, reportFunctionMemberAccess=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from compiled_llm_ops.kernels.attention.launching import with_whole_heads
from compiled_llm_ops.recurrent.contracts import SelectiveScan

NUMBERS = 2048
"""Numbers of the state that a program has: 16 registers of a thread, and as many for their decays, b and c."""


@triton.jit
def _selective_scan(
    tokens, dt, a, b, c, states, qo_indptr, read, write, out,
    count, channels, token_stride, token_head, token_step, dt_stride, dt_head, a_head, a_step,
    b_stride, b_group, b_step, c_stride, c_group, c_step,
    HEAD: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1)
    channel, offs = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS), tl.arange(0, BLOCK)
    head, number, group = channel // HEAD, channel % HEAD, channel // GROUP
    of_channels, mask = channel < channels, offs < SIZE
    both = of_channels[:, None] & mask[None, :]
    begin, end = tl.load(qo_indptr + row), tl.load(qo_indptr + row + 1)
    before, after = tl.load(read + row).to(tl.int64), tl.load(write + row).to(tl.int64)
    places = channel[:, None] * SIZE + offs[None, :]
    state = tl.load(states + before * channels * SIZE + places, mask=both & (before >= 0), other=0.0)
    rate = tl.load(a + head[:, None] * a_head + offs[None, :] * a_step, mask=both, other=0.0).to(tl.float32)
    at = begin.to(tl.int64)
    for _ in range(begin, end):
        taken = tl.load(
            tokens + at * token_stride + head * token_head + number * token_step, mask=of_channels, other=0.0
        ).to(tl.float32)
        step = tl.load(dt + at * dt_stride + head * dt_head, mask=of_channels, other=0.0).to(tl.float32)
        into = tl.load(b + at * b_stride + group[:, None] * b_group + offs[None, :] * b_step, mask=both, other=0.0).to(
            tl.float32
        )
        outof = tl.load(c + at * c_stride + group[:, None] * c_group + offs[None, :] * c_step, mask=both, other=0.0).to(
            tl.float32
        )
        state = state * tl.exp(step[:, None] * rate) + (step * taken)[:, None] * into
        result = tl.sum(state * outof, 1)
        tl.store(out + at * channels + channel, result.to(out.dtype.element_ty), mask=of_channels)
        at += 1
    if row == tl.num_programs(1) - 1:
        for _ in range(end, count):  # padding
            nothing = tl.zeros([CHANNELS], out.dtype.element_ty)
            tl.store(out + at * channels + channel, nothing, mask=of_channels)
            at += 1
    keeps = (after >= 0) & (begin < end)
    tl.store(states + after * channels * SIZE + places, state, mask=both & keeps)


# One kernel for all batches. Other strides and addresses would make others of it, which may add in another order.
_invariant_scan = triton.jit(
    do_not_specialize=[
        "count",
        "token_stride",
        "token_head",
        "dt_stride",
        "b_stride",
        "b_group",
        "c_stride",
        "c_group",
    ],
    do_not_specialize_on_alignment=["tokens", "dt", "b", "c", "qo_indptr", "read", "write"],
)(_selective_scan.fn)


def scan(args: SelectiveScan, out: Tensor) -> None:
    """Launch it on the current device; arguments as of ``selective_scan``, checked, and ``out`` ``[T, H, P]``."""
    (count, heads, head), (_, groups, size), rows = args.tokens.shape, args.b.shape, len(args.read)
    kernel, (tokens, b, c) = _selective_scan, (args.tokens, args.b, args.c)
    if args.invariant:
        kernel, (tokens, b, c) = _invariant_scan, with_whole_heads(tokens, b, c)
    a = args.a if args.a.dim() == 2 else args.a[:, None].expand(heads, size)
    block = triton.next_power_of_2(size)
    channels = min(triton.next_power_of_2(heads * head), max(1, NUMBERS // block))
    if rows:
        kernel[(triton.cdiv(heads * head, channels), rows)](
            tokens, args.dt, a, b, c, args.states, args.qo_indptr, args.read, args.write, out,
            count, heads * head, *tokens.stride(), *args.dt.stride(), *a.stride(), *b.stride(), *c.stride(),
            HEAD=head, GROUP=heads // groups * head, SIZE=size, BLOCK=block, CHANNELS=channels,
            num_warps=4, enable_fp_fusion=not args.invariant,
        )  # fmt: skip
