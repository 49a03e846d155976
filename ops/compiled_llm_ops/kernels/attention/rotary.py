"""RMS norm and rotary embedding of queries and keys, for the Triton kernels that apply them."""

# Shapes: M heads, D head dimension, D' the same as loaded, a power of two.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def prepared(head_ptrs, offs_d, mask, norm, cos_ptr, sin_ptr, epsilon, HEAD: tl.constexpr):
    """Return heads ``[M, D']``: normed if there is a weight, then rotated if there are cosines; else unchanged."""
    # ``head_ptrs`` and ``offs_d`` are ``[M, 1]`` and ``[1, D']``; the second half of a head is rotated against the
    # first.
    states = tl.load(head_ptrs + offs_d, mask=mask, other=0.0)
    if (norm is None) and (cos_ptr is None):
        return states
    dtype = states.dtype
    in_head, second = offs_d < HEAD, offs_d >= HEAD // 2
    partner_d = tl.where(second, offs_d - HEAD // 2, offs_d + HEAD // 2)
    states = states.to(tl.float32)
    factor = tl.full([states.shape[0], 1], 1.0, tl.float32)
    if norm is not None:
        factor = tl.rsqrt(tl.sum(states * states, 1) / HEAD + epsilon)[:, None]
        states = states * factor * tl.load(norm + offs_d, mask=in_head, other=0.0).to(tl.float32)
    if cos_ptr is not None:
        partners = tl.load(head_ptrs + partner_d, mask=mask, other=0.0).to(tl.float32)
        if norm is not None:
            partners = partners * factor * tl.load(norm + partner_d, mask=in_head, other=0.0).to(tl.float32)
        cos = tl.load(cos_ptr + offs_d, mask=in_head, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + offs_d, mask=in_head, other=0.0).to(tl.float32)
        states = states * cos + tl.where(second, partners, -partners) * sin
    return states.to(dtype)
