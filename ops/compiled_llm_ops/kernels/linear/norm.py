"""Triton kernels for what stands between the matmuls of a decode step: a sum and its norm, and the gate of an MLP."""

# They may begin while the previous kernel ends (see ``pdl``).

# Kernels are Triton's objects, not the functions that a type checker sees.
# pyright: reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

GATED_BLOCK = 1024  # outputs of a program that gates


@triton.jit
def _add_rms_norm(
    states, update, weight, total, normed, epsilon,
    INPUTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add and norm one row in each program; rounded where HuggingFace's model rounds: the sum, the normed row."""
    offs = tl.arange(0, BLOCK)
    mask = offs < INPUTS
    offs_row = tl.program_id(0).to(tl.int64) * INPUTS + offs
    factors = tl.load(weight + offs, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    first, second = tl.load(states + offs_row, mask=mask, other=0.0), tl.load(update + offs_row, mask=mask, other=0.0)
    dtype = total.dtype.element_ty
    sums = (first.to(tl.float32) + second.to(tl.float32)).to(dtype)
    tl.store(total + offs_row, sums, mask=mask)
    values = sums.to(tl.float32)
    values *= tl.rsqrt(tl.sum(values * values, 0) / INPUTS + epsilon)
    tl.store(normed + offs_row, (values.to(dtype).to(tl.float32) * factors).to(dtype), mask=mask)


def add_rms_norm(states: Tensor, update: Tensor, weight: Tensor, epsilon: float, *, pdl: bool) -> tuple[Tensor, Tensor]:
    """Return the sum ``[..., I]``, and it normed; all is contiguous, of one dtype, and on the current device."""
    total, normed = torch.empty_like(states), torch.empty_like(states)
    inputs = states.shape[-1]
    rows, block = states.numel() // inputs, triton.next_power_of_2(inputs)
    _add_rms_norm[(rows,)](
        states, update, weight, total, normed, epsilon, INPUTS=inputs, BLOCK=block, PDL=pdl,
        num_warps=min(max(block // 128, 1), 8), **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return total, normed


@triton.jit
def silu(values):
    return values / (1.0 + tl.exp(-values))


@triton.jit
def _silu_and_mul(product, gated, N, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Gate BLOCK outputs of one row; rounded where HuggingFace's model rounds."""
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask, row = offs < N, tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    first = tl.load(product + row * 2 * N + offs, mask=mask, other=0.0)
    second = tl.load(product + row * 2 * N + N + offs, mask=mask, other=0.0)
    gate = silu(first.to(tl.float32)).to(first.dtype).to(tl.float32)
    tl.store(gated + row * N + offs, (gate * second.to(tl.float32)).to(first.dtype), mask=mask)


def silu_and_mul(product: Tensor, *, pdl: bool) -> Tensor:
    """Return ``silu(first) * second`` of both halves of ``product`` ``[M, 2 N]``, contiguous, on the current device."""
    rows, outputs = product.shape[0], product.shape[1] // 2
    gated = product.new_empty(rows, outputs)
    _silu_and_mul[(rows, -(-outputs // GATED_BLOCK))](
        product, gated, outputs, BLOCK=GATED_BLOCK, PDL=pdl, num_warps=4, **({"launch_pdl": True} if pdl else {})
    )
    return gated
