"""Triton kernels that merge results of attention over parts of the keys, by their log-sum-exps."""

# Shapes: T tokens, N states, H heads, D head dimension.

# Kernels are Triton's objects, not the functions that a type checker sees.
# pyright: reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _merge_two(
    v_a, s_a, v_b, s_b, mask, v, s, heads, DIM: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Merge the two states of one token and head; with a mask, tokens that are not in it keep the first."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    item = token * heads + head
    offs = tl.arange(0, BLOCK)
    inside = offs < DIM
    merges = True
    if mask is not None:
        merges = tl.load(mask + token) != 0
    if merges:
        first, second = tl.load(s_a + item), tl.load(s_b + item)
        largest = tl.maximum(first, second)
        base = tl.where(largest == -float("inf"), 0.0, largest)
        weight, other_weight = tl.exp2(first - base), tl.exp2(second - base)
        total = weight + other_weight
        scale = tl.where(total == 0.0, 1.0, total)
        values = tl.load(v_a + item * DIM + offs, mask=inside, other=0.0).to(tl.float32)
        others = tl.load(v_b + item * DIM + offs, mask=inside, other=0.0).to(tl.float32)
        # A state that has seen no key has weight zero; its values may be anything.
        merged = tl.where(weight > 0.0, values * weight, 0.0) + tl.where(other_weight > 0.0, others * other_weight, 0.0)
        tl.store(v + item * DIM + offs, (merged / scale).to(v.dtype.element_ty), mask=inside)
        tl.store(s + item, base + tl.log2(total))


@triton.jit
def _merge_many(
    v, s, merged_v, merged_s, states, heads, DIM: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Merge the states of one token and head, one after the other."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offs = tl.arange(0, BLOCK)
    inside = offs < DIM
    largest = -float("inf")
    total = 0.0
    merged = tl.zeros([BLOCK], tl.float32)
    for state in tl.range(0, states):
        item = (token * states + state) * heads + head
        own = tl.load(s + item)
        if own > -float("inf"):
            values = tl.load(v + item * DIM + offs, mask=inside, other=0.0).to(tl.float32)
            larger = tl.maximum(largest, own)
            fade, weight = tl.exp2(largest - larger), tl.exp2(own - larger)
            merged = merged * fade + values * weight
            total = total * fade + weight
            largest = larger
    item = token * heads + head
    scale = tl.where(total == 0.0, 1.0, total)
    tl.store(merged_v + item * DIM + offs, (merged / scale).to(merged_v.dtype.element_ty), mask=inside)
    tl.store(merged_s + item, tl.where(total == 0.0, -float("inf"), largest + tl.log2(scale)))


def merge_two(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor, mask: Tensor | None, v: Tensor, s: Tensor) -> None:
    """Merge two states ``[T, H, D]`` and ``[T, H]`` into ``v`` and ``s``, at tokens of ``mask`` ``[T]``."""
    # All is contiguous; ``v`` and ``s`` may be the first state.
    tokens, heads, dim = v.shape
    if v.numel():
        _merge_two[(tokens, heads)](
            v_a, s_a, v_b, s_b, mask, v, s, heads,
            DIM=dim, BLOCK=triton.next_power_of_2(dim), num_warps=1,
        )  # fmt: skip


def merge_many(v: Tensor, s: Tensor, merged_v: Tensor, merged_s: Tensor) -> None:
    """Launch the merge of states ``[T, N, H, D]`` and ``[T, N, H]`` into ``[T, H, D]`` and ``[T, H]``."""
    tokens, states, heads, dim = v.shape
    if merged_v.numel():
        _merge_many[(tokens, heads)](
            v, s, merged_v, merged_s, states, heads,
            DIM=dim, BLOCK=triton.next_power_of_2(dim), num_warps=1,
        )  # fmt: skip
