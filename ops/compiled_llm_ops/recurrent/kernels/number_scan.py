"""A Triton kernel of the selective scan with a decay of each number (Mamba 1), for prompts."""

# There are no chunks for it: what decays between two tokens is another matrix for each channel. So a program walks from
# token to token, with fewer channels than that for decode, so that a single row fills a GPU. It computes some tokens
# before it writes their results, so that loads need not wait for each other.
# Shapes: T packed tokens, H heads, P size of a head, N size of a state, G groups of heads, B rows.

# Kernels are Triton's objects, not the functions that a type checker sees.
# pyright: reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from compiled_llm_ops.recurrent.contracts import SelectiveScan

CHANNELS, AHEAD = 32, 8  # channels of a program, and tokens that it computes before it writes; not measured yet


@triton.jit(do_not_specialize=["count"])
def _scan_numbers(
    tokens, dt, a, b, c, states, qo_indptr, read, write, out,
    count, channels, token_stride, token_head, token_step, dt_stride, dt_head, a_head, a_step,
    b_stride, b_group, b_step, c_stride, c_group, c_step,
    HEAD: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, CHANNELS: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Scan a row's tokens with some channels of one group."""
    row = tl.program_id(1)
    first_channel = tl.program_id(0) * CHANNELS
    channel, offs = first_channel + tl.arange(0, CHANNELS), tl.arange(0, BLOCK)
    head, number, group = channel // HEAD, channel % HEAD, first_channel // GROUP
    of_channels, mask = channel < channels, offs < SIZE
    both = of_channels[:, None] & mask[None, :]
    begin, end = tl.load(qo_indptr + row), tl.load(qo_indptr + row + 1)
    before, after = tl.load(read + row).to(tl.int64), tl.load(write + row).to(tl.int64)
    places = channel[:, None] * SIZE + offs[None, :]
    state = tl.load(states + before * channels * SIZE + places, mask=both & (before >= 0), other=0.0)
    rate = tl.load(a + head[:, None] * a_head + offs[None, :] * a_step, mask=both, other=0.0).to(tl.float32)
    ahead, at = tl.arange(0, AHEAD), begin.to(tl.int64)
    for first in range(begin, end, AHEAD):
        results = tl.zeros([AHEAD, CHANNELS], tl.float32)
        for one in tl.static_range(AHEAD):
            live = first + one < end
            taken = tl.load(
                tokens + at * token_stride + head * token_head + number * token_step, mask=of_channels & live, other=0.0
            ).to(tl.float32)
            step = tl.load(dt + at * dt_stride + head * dt_head, mask=of_channels & live, other=0.0).to(tl.float32)
            into = tl.load(b + at * b_stride + group * b_group + offs * b_step, mask=mask & live, other=0.0)
            outof = tl.load(c + at * c_stride + group * c_group + offs * c_step, mask=mask & live, other=0.0)
            at += 1
            # A time step of 0, as after the last token, leaves a state as it is.
            state = state * tl.exp(step[:, None] * rate) + (step * taken)[:, None] * into.to(tl.float32)[None, :]
            result = tl.sum(state * outof.to(tl.float32)[None, :], 1)
            results = tl.where((ahead == one)[:, None], result[None, :], results)
        tl.store(
            out + (at - AHEAD + ahead)[:, None] * channels + channel[None, :],
            results.to(out.dtype.element_ty),
            mask=(first + ahead < end)[:, None] & of_channels[None, :],
        )
    if row == tl.num_programs(1) - 1:
        for first in range(end, count, AHEAD):  # padding
            padding = first + ahead
            tl.store(
                out + padding.to(tl.int64)[:, None] * channels + channel[None, :],
                tl.zeros([AHEAD, CHANNELS], out.dtype.element_ty),
                mask=(padding < count)[:, None] & of_channels[None, :],
            )
    keeps = (after >= 0) & (begin < end)
    tl.store(states + after * channels * SIZE + places, state, mask=both & keeps)


def scans_numbers(args: SelectiveScan) -> bool:
    """Whether there is this kernel for arguments: no program may have channels of two groups."""
    (_, heads, head), groups = args.tokens.shape, args.b.shape[1]
    return args.a.dim() == 2 and (groups == 1 or heads // groups * head % CHANNELS == 0)


def scan_numbers(args: SelectiveScan, out: Tensor) -> None:
    """Launch it into ``out`` ``[T, H, P]``; arguments as of ``selective_scan``, for which ``scans_numbers`` holds."""
    (count, heads, head), (_, groups, size), rows = args.tokens.shape, args.b.shape, len(args.read)
    if rows:
        _scan_numbers[(triton.cdiv(heads * head, CHANNELS), rows)](
            args.tokens, args.dt, args.a, args.b, args.c, args.states, args.qo_indptr, args.read, args.write, out,
            count, heads * head, *args.tokens.stride(), *args.dt.stride(), *args.a.stride(),
            *args.b.stride(), *args.c.stride(), HEAD=head, GROUP=heads // groups * head, SIZE=size,
            BLOCK=triton.next_power_of_2(size), CHANNELS=CHANNELS, AHEAD=AHEAD, num_warps=1,
        )  # fmt: skip
