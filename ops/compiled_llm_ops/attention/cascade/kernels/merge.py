"""A Triton kernel that merges what rows got of shared runs into what they got of their own keys.

Shapes: B rows, P parts, H heads, D head dimension.
"""

# Kernels are Triton's objects, not the functions that a type checker sees.
# pyright: reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_llm_ops.attention.cascade.contract import CASCADE_LEVELS

PARTS_AT_ONCE = 8
"""Parts that are loaded at a time; not yet fitted."""


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
