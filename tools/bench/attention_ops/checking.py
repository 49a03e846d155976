"""Whether a contender computes what dense attention in plain PyTorch does."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attention_ops.inputs import Inputs
from compiled_llm_ops.plain_attention import attend_row_by_row

TOLERANCE = 0.02
"""How far the result of a head may be off, as a share of its norm: bfloat16 rounds probabilities, partial results and
results by up to 0.4% each."""


def dense(inputs: Inputs) -> Tensor:
    """Return ``[T, H, D]``, one row after the other."""
    part = inputs.whole
    out, _ = attend_row_by_row(part.query, inputs.pages[0], part.device, inputs.scale, -1, 0.0, False)
    return out


def deviation(parts: Sequence[Tensor], expected: Tensor) -> float:
    """Return how far the worst head of a token is from what is expected, as a share of its norm; NaN counts as inf.

    Each head of each token by itself: of many keys results are small, and their faults would vanish beside others.
    """
    found = torch.cat([part.float() for part in parts])
    if found.shape != expected.shape:
        raise ValueError(f"it returned {list(found.shape)} and not {list(expected.shape)}")
    off = (found - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1)
    return float(off.nan_to_num(nan=torch.inf).max())
