"""Rows of random latents in two pools of pages, rotated parts apart, with dense attention over them in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from support.flashinfer_api.strided_rows import UNWRITTEN, dense

LENGTHS, QUERIES = [1, 4, 5, 17, 0, 9, 2], [1, 4, 2, 3, 2, 0, 5]
"""One token, a full page, one more; a row without tokens, one without queries, and one of fewer tokens than queries."""


class LatentPools:
    """`[P, S, R]` and `[P, S, E]`, in which unwritten slots are not a number, and queries `[T, H, ...]`."""

    def __init__(
        self,
        lengths: Sequence[int] = LENGTHS,
        queries: Sequence[int] = QUERIES,
        *,
        heads: int = 4,
        rank: int = 16,
        rope: int = 16,
        page_size: int = 4,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.lengths, self.queries, self.page_size, self.rank = list(lengths), list(queries), page_size, rank
        self.scale = (rank + rope) ** -0.5
        counts = [max(1, -(-length // page_size)) for length in lengths]
        order = torch.randperm(sum(counts) + 2, generator=generator)
        self.indices = order[: sum(counts)].int()
        self.indptr, self.qo_indptr = (torch.tensor([0, *own]).cumsum(0).int() for own in (counts, queries))
        self.kv_len = torch.tensor(self.lengths, dtype=torch.int32)
        self.query = torch.randn(sum(queries), heads, rank + rope, generator=generator).to(dtype)
        self.states = [torch.randn(length, rank + rope, generator=generator).to(dtype) for length in lengths]
        self.pool = torch.full((len(order), page_size, rank + rope), UNWRITTEN, dtype=dtype)
        for row, own in enumerate(self.states):
            for position, state in enumerate(own):
                page = self.indices[int(self.indptr[row]) + position // page_size]
                self.pool[page, position % page_size] = state

    @property
    def table(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.qo_indptr, self.indptr, self.indices, self.kv_len

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries and pools, latents and rotated parts: views of one tensor each."""
        rank = self.rank
        return self.query[..., :rank], self.query[..., rank:], self.pool[..., :rank], self.pool[..., rank:]

    @property
    def apart(self) -> tuple[Tensor, ...]:
        """The same, each contiguous."""
        return tuple(states.contiguous() for states in self.parts)

    def expected(self, causal: bool) -> tuple[Tensor, Tensor]:
        found = []
        for row, own in enumerate(self.states):
            query = self.query[int(self.qo_indptr[row]) : int(self.qo_indptr[row + 1])]
            found.append(dense(query, own[:, None], own[:, None, : self.rank], self.scale, causal=causal))
        return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found])

    def plan(self, causal: bool) -> list[Any]:
        """The arguments of FlashInfer's plan."""
        sizes = [self.query.shape[1], self.rank, self.query.shape[2] - self.rank, self.page_size]
        return [*self.table, *sizes, causal, self.scale, self.query.dtype, self.pool.dtype]
