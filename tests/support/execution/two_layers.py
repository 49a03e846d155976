"""Two layers of attention over one page table, with something before, between and after them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compiled_llm_ops import decode_attention, decode_attention_lse

HEADS, KV_HEADS, SIZE, PAGE = 4, 2, 64, 16


class TwoLayers:
    """A step of two rows, which grow by a token in each; tensors stay where they are."""

    def __init__(self, seed: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        generator, self._of = torch.Generator().manual_seed(seed), {"device": device, "dtype": dtype}
        self._generator = generator
        self.hidden = torch.zeros(2, HEADS * SIZE, device=device, dtype=dtype)  # what a step begins with
        weights = torch.randn(3, HEADS * SIZE, HEADS * SIZE, generator=generator) / (HEADS * SIZE) ** 0.5
        self._weights = weights.to(**self._of)
        # of each layer
        self.pages = [torch.zeros(5, 2, KV_HEADS, PAGE, SIZE, device=device, dtype=dtype) for _ in range(2)]
        integers: dict[str, Any] = {"device": device, "dtype": torch.int32}
        self.lengths = torch.tensor([1, 3], **integers)  # of the rows
        self._table = torch.tensor([0, 2], **integers), self.lengths, torch.tensor([1, 2, 3, 4], **integers)

    def inputs(self, count: int) -> Tensor:
        """Return so many to begin with."""
        return torch.randn(count, *self.hidden.shape, generator=self._generator).to(**self._of)

    def begin(self, hidden: Tensor) -> None:
        """Forget earlier tokens, and begin with this."""
        self.hidden.copy_(hidden)
        self.lengths.copy_(torch.tensor([1, 3], dtype=torch.int32))
        for pages in self.pages:
            pages.zero_()

    def step(self) -> tuple[Tensor, Tensor]:
        """Run one; returns what the last layer gives."""
        hidden = self.hidden @ self._weights[0]
        first = decode_attention(*self._states(hidden), self.pages[0], *self._table, 0.25)
        hidden = hidden + first.view(2, -1) @ self._weights[1]
        second, lse = decode_attention_lse(*self._states(hidden), self.pages[1], *self._table, 0.25)
        out = hidden + second.view(2, -1) @ self._weights[2]
        self.lengths.add_(1)
        return out, lse + 1

    def _states(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query = hidden.view(2, HEADS, SIZE)
        return query, query[:, :KV_HEADS] * 2, query[:, KV_HEADS:]
