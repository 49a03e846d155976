"""Rows that begin alike, in pages that they share, with attention computed row by row over contiguous keys.

Shapes: B rows, L tokens of one row, H query heads, K kv heads, D head dimension, P pages, S page size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compiled_llm_ops import CascadeTables, SharedRun, cascade_tables

PROCESSORS = 8


class CascadeRows:
    """Rows of random keys and values; free slots and those of the newest tokens hold NaN.

    Each run is its rows and how many pages it has, and begins where the last run of its rows has ended. `tails` are the
    keys of each row after its runs.
    """

    def __init__(
        self,
        runs: Sequence[tuple[Sequence[int], int]],
        tails: Sequence[int],
        *,
        group: int = 2,
        kv_heads: int = 2,
        head_dim: int = 8,
        padded: int | None = None,
        page_size: int = 4,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        max_items: int = 32,
        max_parts: int = 1024,
        processors: int = PROCESSORS,
        spare_pages: int = 0,
    ) -> None:
        self.generator, self.dtype = torch.Generator().manual_seed(seed), dtype
        self.page_size, self.kv_heads, self.head_dim, self.group = page_size, kv_heads, head_dim, group
        rows = len(tails)
        self.runs: list[SharedRun] = []
        own: list[list[int]] = [[] for _ in range(rows)]
        counts = [-(-tail // page_size) + spare_pages for tail in tails]
        total = sum(counts) + sum(pages for _, pages in runs)
        free = (torch.randperm(total, generator=self.generator) + 1).tolist()
        for members, pages in runs:
            numbers = [free.pop() for _ in range(pages)]
            self.runs.append(SharedRun(tuple(members), len(own[members[0]]), pages))
            for row in members:
                own[row] += numbers
        self.shared = [len(numbers) * page_size for numbers in own]
        for numbers, count in zip(own, counts, strict=True):
            numbers += [free.pop() for _ in range(count)]
        self.own = own
        self.lengths = [shared + tail for shared, tail in zip(self.shared, tails, strict=True)]
        stored = padded or head_dim
        self.pages = torch.full((total + 2, 2, kv_heads, page_size, stored), torch.nan, dtype=dtype)
        self.pages[..., head_dim:] = 0
        filled: set[int] = set()
        for numbers, length in zip(own, self.lengths, strict=True):
            for first, number in zip(range(0, length - 1, page_size), numbers, strict=False):
                if number not in filled:
                    count = min(page_size, length - 1 - first)
                    self.pages[number, :, :, :count, :head_dim] = self.random(2, kv_heads, count, head_dim)
                    filled.add(number)
        self.query = self.random(rows, kv_heads * group, head_dim)
        self.key, self.value = self.random(rows, kv_heads, head_dim), self.random(rows, kv_heads, head_dim)
        # Not from 0 on, and with numbers between that no row has.
        self.starts = [3 + sum(len(numbers) + 1 for numbers in own[:row]) for row in range(rows)]
        self.indices = torch.full((self.starts[-1] + len(own[-1]) + 2,), total + 1, dtype=torch.int32)
        for start, numbers in zip(self.starts, own, strict=True):
            self.indices[start : start + len(numbers)] = torch.tensor(numbers, dtype=torch.int32)
        self.scale = head_dim**-0.5
        self.max_items, self.max_parts, self.processors = max_items, max_parts, processors

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def tables(self) -> CascadeTables:
        heads = self.kv_heads * self.group
        limits = self.processors, self.max_items, self.max_parts
        return cascade_tables(self.runs, self.starts, self.page_size, heads, self.kv_heads, *limits)

    def arguments(self, tables: CascadeTables | None = None) -> tuple[Any, ...]:
        """The op's, in pages of their own, up to the scale."""
        starts, lengths = (torch.tensor(own, dtype=torch.int32) for own in (self.starts, self.lengths))
        columns = [torch.from_numpy(np.array(column)) for column in tables or self.tables()]
        return (
            self.query, self.key, self.value, self.pages.clone(), starts, lengths, self.indices, *columns,
            self.max_parts, self.scale,
        )  # fmt: skip

    def forget_before(self, position: int) -> None:
        """Let the keys and values of all rows before this position be NaN."""
        for own in self.own:
            for at in range(position):
                self.pages[own[at // self.page_size], :, :, at % self.page_size] = torch.nan

    def written(self, key: Tensor | None = None) -> Tensor:
        """The pages with the newest keys and values, row by row."""
        pages, key = self.pages.clone(), self.key if key is None else key
        for row, length in enumerate(self.lengths):
            page, slot = self.own[row][(length - 1) // self.page_size], (length - 1) % self.page_size
            pages[page, 0, :, slot, : self.head_dim] = key[row]
            pages[page, 1, :, slot, : self.head_dim] = self.value[row]
        return pages

    def expected(
        self, window_left: int = -1, soft_cap: float = 0.0, query: Tensor | None = None, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`[B, H, D]` and the log-sum-exp in base 2 `[B, H]`, in float32, from each row's own keys."""
        pages, query = self.written(key).float(), self.query if query is None else query
        outs, lses = [], []
        for row, length in enumerate(self.lengths):
            slots = [(self.own[row][at // self.page_size], at % self.page_size) for at in range(length)]
            begin = max(0, length - 1 - window_left) if window_left >= 0 else 0
            numbers, places = (torch.tensor(column) for column in zip(*slots[begin:], strict=True))
            states = pages[numbers, :, :, places, : self.head_dim].repeat_interleave(self.group, 2)
            logits = torch.einsum("hd,lhd->hl", query[row].float(), states[:, 0]) * self.scale
            if soft_cap:
                logits = soft_cap * torch.tanh(logits / soft_cap)
            outs.append(torch.einsum("hl,lhd->hd", logits.softmax(-1), states[:, 1]))
            lses.append(torch.logsumexp(logits, -1) / math.log(2))
        return torch.stack(outs), torch.stack(lses)


def turned(states: Tensor, norm: Tensor | None, epsilon: float, cos: Tensor | None, sin: Tensor | None) -> Tensor:
    """Queries or keys `[B, heads, D]` as a model norms and rotates them, in float32."""
    states = states.float()
    if norm is not None:
        states = states / (states.pow(2).mean(-1, keepdim=True) + epsilon).sqrt() * norm.float()
    if cos is None or sin is None:
        return states
    half = states.shape[-1] // 2
    mates = torch.cat([-states[..., half:], states[..., :half]], -1)
    return states * cos.float()[:, None] + mates * sin.float()[:, None]
