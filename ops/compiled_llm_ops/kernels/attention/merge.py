"""Triton kernels that merge results of attention over parts of the keys, by their log-sum-exps.

Shapes: T tokens, N states, H heads, D head dimension; of ``cascade_attention``: B rows, P parts.
"""

# Kernels are Triton's objects, not the functions that a type checker sees.
# pyright: reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_llm_ops.contracts.cascade import CASCADE_LEVELS

PARTS_AT_ONCE = 8
"""Parts of ``cascade_attention`` that are loaded at a time; not yet fitted."""


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


@triton.jit
def _merge_state_parts(
    v, s, parts, lses, merge_parts, heads,
    LEVELS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one row and head into its state, level by level; a row without parts is left as it is."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    own = merge_parts + row * (3 * LEVELS)
    counts = 0
    for level in tl.static_range(LEVELS):
        counts += tl.load(own + 3 * level + 1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if counts > 0:
        item = row * heads + head
        offs_d = tl.arange(0, BLOCK)
        inside = offs_d < DIM
        largest = tl.load(s + item)
        merged = tl.load(v + item * DIM + offs_d, mask=inside, other=0.0).to(tl.float32)
        total = 1.0
        for level in tl.static_range(LEVELS):
            first, count, distance = (
                tl.load(own + 3 * level), tl.load(own + 3 * level + 1), tl.load(own + 3 * level + 2)
            )  # fmt: skip
            for start in tl.range(0, count, CHUNK):
                part = start + tl.arange(0, CHUNK)
                offs_p = (first + part * distance).to(tl.int64) * heads + head
                others = tl.load(lses + offs_p, mask=part < count, other=-float("inf"))
                # Values of a part that has seen no key are not read.
                seen = (others > -float("inf"))[:, None] & inside[None, :]
                values = tl.load(parts + offs_p[:, None] * DIM + offs_d[None, :], mask=seen, other=0.0).to(tl.float32)
                larger = tl.maximum(largest, tl.max(others))  # finite: a row's newest key is its own
                weights = tl.exp2(others - larger)
                fade = tl.exp2(largest - larger)
                merged = merged * fade + tl.sum(weights[:, None] * values, 0)
                total = total * fade + tl.sum(weights)
                largest = larger
        tl.store(v + item * DIM + offs_d, (merged / total).to(v.dtype.element_ty), mask=inside)
        tl.store(s + item, largest + tl.log2(total))


def merge_two(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor, mask: Tensor | None, v: Tensor, s: Tensor) -> None:
    """Launch the merge of two states ``[T, H, D]`` and ``[T, H]`` into ``v`` and ``s``, which may be the first.

    All is contiguous and on one device, the current one; ``mask`` ``[T]`` says which tokens are merged.
    """
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


def merge_parts(v: Tensor, s: Tensor, parts: Tensor, lses: Tensor, table: Tensor, *, pdl: bool) -> None:
    """Launch the merge of parts ``[P, H, D]`` and ``[P, H]`` into the states ``[B, H, D]`` and ``[B, H]`` of rows.

    All is contiguous and on one device, the current one; ``table`` is ``merge_parts`` of ``cascade_attention``, and the
    log-sum-exps ``s`` are finite. With ``pdl`` it begins before the previous kernel has ended.
    """
    rows, heads, dim = v.shape
    if v.numel():
        _merge_state_parts[(rows, heads)](
            v, s, parts, lses, table, heads, LEVELS=CASCADE_LEVELS, DIM=dim, BLOCK=triton.next_power_of_2(dim),
            CHUNK=PARTS_AT_ONCE, PDL=pdl, num_warps=1, **({"launch_pdl": True} if pdl else {}),
        )  # fmt: skip
