"""A Triton kernel of the short causal convolution."""

# Shapes: T packed tokens, C channels, W width of the kernel, E entries.

# Kernels are Triton's objects, not the functions that a type checker sees.
# pyright: reportIndexIssue=false, reportFunctionMemberAccess=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from compiled_llm_ops.recurrent.contracts import CausalConv1d

CHANNELS = 256  # channels of a program


@triton.jit
def _causal_conv1d(
    tokens, weight, bias, states, token_rows, qo_indptr, read, write, out,
    channels, token_stride, token_step, weight_stride, weight_step,
    WIDTH: tl.constexpr, BIASED: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Convolve some channels of one token."""
    # What it reads is the state after this token, which the last one of a row writes. The others need no order, since
    # no entry is written that is read.
    token = tl.program_id(0)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < channels
    row = tl.load(token_rows + token)
    begin, end = tl.load(qo_indptr + row), tl.load(qo_indptr + row + 1)
    live = (token >= begin) & (token < end)
    before, after = tl.load(read + row).to(tl.int64), tl.load(write + row).to(tl.int64)
    keeps = live & (token == end - 1) & (after >= 0)
    total = tl.zeros([BLOCK], tl.float32)
    if BIASED:
        total += tl.load(bias + offs, mask=mask).to(tl.float32)
    for column in tl.static_range(WIDTH):
        place = token - (WIDTH - 1) + column
        own = tl.load(
            tokens + place.to(tl.int64) * token_stride + offs * token_step,
            mask=mask & live & (place >= begin),
            other=0.0,
        )
        held = tl.load(
            states + (before * channels + offs) * WIDTH + (WIDTH + place - begin),
            mask=mask & live & (place < begin) & (before >= 0),
            other=0.0,
        )
        newest = own + held  # one of them is 0
        factor = tl.load(weight + offs * weight_stride + column * weight_step, mask=mask, other=0.0)
        total += newest.to(tl.float32) * factor.to(tl.float32)
        tl.store(states + (after * channels + offs) * WIDTH + column, newest, mask=mask & keeps)
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    total = tl.where(live, total, 0.0)
    tl.store(out + token.to(tl.int64) * channels + offs, total.to(out.dtype.element_ty), mask=mask)


# One kernel for all batches. Other strides and addresses would make others of it, which may round otherwise.
_invariant_conv1d = triton.jit(
    do_not_specialize=["token_stride"],
    do_not_specialize_on_alignment=["tokens", "token_rows", "qo_indptr", "read", "write"],
)(_causal_conv1d.fn)


def convolve(args: CausalConv1d, out: Tensor) -> None:
    """Launch it on the current device; arguments as of ``causal_conv1d``, checked, and ``out`` ``[T, C]``."""
    (count, channels), width = args.tokens.shape, args.weight.shape[1]
    kernel, tokens = _causal_conv1d, args.tokens
    if args.invariant:
        kernel, tokens = _invariant_conv1d, tokens if tokens.stride(1) == 1 else tokens.contiguous()
    block = min(CHANNELS, triton.next_power_of_2(channels))
    if count:
        kernel[(count, triton.cdiv(channels, block))](
            tokens, args.weight, args.bias, args.states, args.token_rows, args.qo_indptr, args.read, args.write,
            out, channels, *tokens.stride(), *args.weight.stride(),
            WIDTH=width, BIASED=args.bias is not None, SILU=args.activation == "silu", BLOCK=block, num_warps=2,
            enable_fp_fusion=not args.invariant,
        )  # fmt: skip
