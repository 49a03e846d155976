"""RMS norm and rotary embedding of queries and keys, for the Triton kernels that apply them."""

# Shapes: M heads, D head dimension, D' the same as loaded, a power of two.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def loaded(head_ptrs, offs_d, mask, norm, cos_ptr, sin_ptr, HEAD: tl.constexpr):
    """Ask at once for all that ``turned`` needs of heads ``[M, D']``, so that no load waits for another."""
    # ``head_ptrs`` and ``offs_d`` are ``[M, 1]`` and ``[1, D']``; the second half of a head is rotated against the
    # first. What is not there stands for nothing: a function returns no None.
    in_head = offs_d < HEAD
    partner_d = tl.where(offs_d >= HEAD // 2, offs_d - HEAD // 2, offs_d + HEAD // 2)
    states = tl.load(head_ptrs + offs_d, mask=mask, other=0.0)
    partners, factors, partner_factors, cos, sin = states, states, states, states, states
    if norm is not None:
        factors = tl.load(norm + offs_d, mask=in_head, other=0.0)
    if cos_ptr is not None:
        partners = tl.load(head_ptrs + partner_d, mask=mask, other=0.0)
        if norm is not None:
            partner_factors = tl.load(norm + partner_d, mask=in_head, other=0.0)
        cos = tl.load(cos_ptr + offs_d, mask=in_head, other=0.0)
        sin = tl.load(sin_ptr + offs_d, mask=in_head, other=0.0)
    return states, partners, factors, partner_factors, cos, sin


@triton.jit
def turned(given, offs_d, norm, cos_ptr, epsilon, HEAD: tl.constexpr):
    """Return what ``prepared`` does, of what has been ``loaded``."""
    states, partners, factors, partner_factors, cos, sin = given
    if (norm is None) and (cos_ptr is None):
        return states
    dtype = states.dtype
    states = states.to(tl.float32)
    factor = tl.full([states.shape[0], 1], 1.0, tl.float32)
    if norm is not None:
        factor = tl.rsqrt(tl.sum(states * states, 1) / HEAD + epsilon)[:, None]
        states = states * factor * factors.to(tl.float32)
    if cos_ptr is not None:
        others = partners.to(tl.float32)
        if norm is not None:
            others = others * factor * partner_factors.to(tl.float32)
        signed = tl.where(offs_d >= HEAD // 2, others, -others)
        states = states * cos.to(tl.float32) + signed * sin.to(tl.float32)
    return states.to(dtype)


@triton.jit
def prepared(head_ptrs, offs_d, mask, norm, cos_ptr, sin_ptr, epsilon, HEAD: tl.constexpr):
    """Return heads ``[M, D']``: normed if there is a weight, then rotated if there are cosines; else unchanged."""
    given = loaded(head_ptrs, offs_d, mask, norm, cos_ptr, sin_ptr, HEAD)
    return turned(given, offs_d, norm, cos_ptr, epsilon, HEAD)
