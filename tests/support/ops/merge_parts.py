"""Attention over parts of the keys, for tests of what merges them.

Shapes: T tokens, N states, H heads, D head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def attended(logits: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of ``[T, H, keys]`` logits over ``[keys, H, D]`` values, and its log-sum-exp in base 2."""
    weights = torch.nan_to_num(logits.softmax(-1))
    return torch.einsum("thk,khd->thd", weights, values), torch.logsumexp(logits, -1) / math.log(2)


class Parts:
    """Attention of 3 tokens and 2 heads over keys in parts of these sizes; tokens do not see hidden keys."""

    def __init__(
        self, sizes: Sequence[int], seed: int, hidden: float = 0.3, dtype: torch.dtype = torch.float32
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        logits = 4 * torch.randn(3, 2, sum(sizes), generator=generator, dtype=torch.float64)
        logits[torch.rand(logits.shape, generator=generator) < hidden] = -torch.inf
        values = torch.randn(sum(sizes), 2, 8, generator=generator, dtype=torch.float64)
        self.expected = [part.float() for part in attended(logits, values)]
        parts = [attended(*both) for both in zip(logits.split(sizes, -1), values.split(sizes), strict=True)]
        self.v = torch.stack([v for v, _ in parts], 1).to(dtype)
        self.s = torch.stack([s for _, s in parts], 1).float()
        self.v[self.s == -torch.inf] = torch.nan  # what has seen no key is not read

    def check(self, v: Tensor, s: Tensor, tolerance: float = 1e-5) -> None:
        torch.testing.assert_close(v.cpu().float(), self.expected[0], rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(s.cpu(), self.expected[1], rtol=1e-5, atol=1e-5)
