"""What launches of attention over pages have in common, before their kernels run."""

# Shapes: T tokens, H query heads, D head dimension, P pages, K kv heads, S page size, D' head dimension as stored.

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def check_launch(op: str, query: Tensor, pages: Tensor, dtypes: Sequence[torch.dtype]) -> None:
    """Raise ValueError if queries have another dtype than the kernel takes, or the pages are not contiguous."""
    if query.dtype not in dtypes:
        raise ValueError(f"{op}: no kernel for {query.dtype} queries; use {', '.join(map(str, dtypes))}")
    if not pages.is_contiguous():
        raise ValueError(f"{op}: pages must be contiguous")


def with_whole_heads(*states: Tensor) -> tuple[Tensor, ...]:
    """Return states ``[T, H, D]`` whose heads are contiguous; the other strides are the kernel's arguments."""
    return tuple(each if each.stride(2) == 1 else each.contiguous() for each in states)


def contiguous(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return tensors contiguous, those that there are."""
    return tuple(each if each is None else each.contiguous() for each in tensors)


def factors(scale: float, logits_soft_cap: float) -> tuple[float, float]:
    """Return the factor on products of queries and keys, and the cap, 0 for none: logits are in base 2 then."""
    if logits_soft_cap > 0:
        return scale / logits_soft_cap, logits_soft_cap * math.log2(math.e)
    return scale * math.log2(math.e), 0.0
