"""Rows whose kv heads read listed pages, with attention over these computed densely, one query after the other.

Shapes: B rows, T = B * q new tokens, L tokens of one row, H query heads, K kv heads, D head dimension, D' the same as
stored, P pages, S page size, n pages of a list.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import torch
from torch import Tensor

from compiled_llm_ops.contracts import DecodeAttention

FP8 = torch.float8_e4m3fn


class ListedRows:
    """Rows in pages of random order; what a kv head does not read, and what is not written yet, holds NaN.

    Lists are random: shorter than they may be, with -1 anywhere, with pages of new tokens, and with pages that the row
    does not have.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        kv_heads: int = 2,
        group: int = 2,
        head_dim: int = 64,
        stored: int | None = None,
        page_size: int = 16,
        listed: int = 3,
        new_tokens: int = 1,
        fp8: bool = False,
        dtype: torch.dtype = torch.float16,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        torch.manual_seed(seed)
        self.lengths, self.kv_heads, self.page_size, self.new_tokens = list(lengths), kv_heads, page_size, new_tokens
        self.device, self.dtype, self.scale, self.head_dim = device, dtype, head_dim**-0.5, head_dim
        self.scales = (torch.rand(kv_heads) / 50 + 0.01, torch.rand(kv_heads) / 50 + 0.01) if fp8 else None
        states = [torch.randn(2, length, kv_heads, head_dim).to(dtype) for length in lengths]
        self.newest = torch.cat([own[:, -new_tokens:] for own in states], 1)
        self.stored = [self._stored(own) for own in states]
        self.query = torch.randn(len(lengths) * new_tokens, kv_heads * group, head_dim).to(dtype)
        choice = random.Random(seed)
        self.lists = [[self._list(length, listed, choice) for _ in range(kv_heads)] for length in lengths]
        self._lay(stored or head_dim)

    def _stored(self, states: Tensor) -> Tensor:
        if self.scales is None:
            return states
        scaled = [own.float() / scale[:, None] for own, scale in zip(states, self.scales, strict=True)]
        return torch.stack(scaled).clamp(-448, 448).to(FP8)

    def _list(self, length: int, listed: int, choice: random.Random) -> list[int]:
        pages = list(range(-(-length // self.page_size) + 2))
        own = choice.sample(pages, choice.randint(0, min(listed, len(pages))))
        own += [-1] * (listed - len(own))
        choice.shuffle(own)
        return own

    def _lay(self, stored: int) -> None:
        size, counts = self.page_size, [-(-length // self.page_size) for length in self.lengths]
        order = torch.randperm(sum(counts)) + 1
        starts = [sum(counts[:row]) for row in range(len(counts))]
        pages = torch.full((sum(counts) + 3, 2, self.kv_heads, size, stored), torch.nan)
        pages[..., self.head_dim :] = 0
        pages = pages.to(FP8 if self.scales else self.dtype)
        for row, (states, start, length) in enumerate(zip(self.stored, starts, self.lengths, strict=True)):
            for at in range(length - self.new_tokens):
                for head in range(self.kv_heads):
                    if at // size in self.read(row, head):
                        where = pages[order[start + at // size], :, head, at % size, : self.head_dim]
                        where.copy_(states[:, at, head])
        self.pages = pages.to(self.device)
        self.indices = torch.cat([order, order.new_full((9,), sum(counts) + 2)]).int().to(self.device)
        self.starts = torch.tensor(starts, dtype=torch.int32).to(self.device)

    def read(self, row: int, head: int) -> set[int]:
        """The pages that a kv head reads."""
        length, size = self.lengths[row], self.page_size
        return {*self.lists[row][head], *range((length - self.new_tokens) // size, -(-length // size))}

    def arguments(self, window_left: int = -1, soft_cap: float = 0.0) -> DecodeAttention:
        key, value = self.newest.to(self.device)
        lengths, visible = (torch.tensor(own, dtype=torch.int32).to(self.device) for own in (self.lengths, self.lists))
        key_scale, value_scale = [None] * 2 if self.scales is None else [own.to(self.device) for own in self.scales]
        return DecodeAttention(
            self.query.to(self.device), key, value, self.pages.clone(), self.starts, lengths, self.indices, self.scale,
            window_left, soft_cap, key_scale=key_scale, value_scale=value_scale, visible=visible,
        )  # fmt: skip

    def written(self) -> Tensor:
        """The pages with the new tokens, as bytes."""
        pages, size = self.pages.clone(), self.page_size
        for start, states, length in zip(self.starts.tolist(), self.stored, self.lengths, strict=True):
            for at in range(length - self.new_tokens, length):
                number = int(self.indices[start + at // size])
                pages[number, :, :, at % size, : self.head_dim] = states[:, at].to(self.device)
        return pages.view(torch.uint8)

    def expected(self, window_left: int = -1, soft_cap: float = 0.0) -> tuple[Tensor, Tensor]:
        """`[T, H, D]` and the log-sum-exp `[T, H]` in base 2, in float32."""
        group, new = self.query.shape[1] // self.kv_heads, self.new_tokens
        out, lse = torch.zeros(self.query.shape), torch.zeros(self.query.shape[:2])
        for token in range(len(self.query)):
            row = token // new
            own = self.lengths[row] - new + token % new
            for head in range(self.query.shape[1]):
                kv_head = head // group
                keys, values = self.stored[row][:, :, kv_head].float()
                if self.scales is not None:
                    keys, values = keys * self.scales[0][kv_head], values * self.scales[1][kv_head]
                seen = [
                    at
                    for page in self.read(row, kv_head)
                    for at in range(page * self.page_size, (page + 1) * self.page_size)
                    if 0 <= at <= own and (window_left < 0 or at >= own - window_left)
                ]
                logits = keys[seen] @ self.query[token, head].float() * self.scale
                if soft_cap:
                    logits = soft_cap * torch.tanh(logits / soft_cap)
                out[token, head] = torch.softmax(logits, 0) @ values[seen]
                lse[token, head] = torch.logsumexp(logits, 0) / math.log(2)
        return out.to(self.device), lse.to(self.device)


SIZES: list[dict[str, int]] = [
    {},
    {"page_size": 1, "listed": 40},
    {"page_size": 5},
    {"page_size": 64, "listed": 2},
    {"page_size": 256, "listed": 1},
    {"group": 5, "listed": 0},
    {"head_dim": 96, "stored": 128, "listed": 9},
    {"new_tokens": 2},
    {"new_tokens": 3, "page_size": 1, "group": 1},
    {"new_tokens": 9, "page_size": 4, "listed": 6},
    {"fp8": True},
    {"fp8": True, "new_tokens": 2, "listed": 8},
]
OPTIONS = [(-1, 0.0), (0, 0.0), (40, 0.0), (-1, 2.0), (200, 5.0)]
"""Windows and caps."""


def lengths_of(sizes: dict[str, int]) -> list[int]:
    """At borders of pages."""
    page, new = sizes.get("page_size", 16), sizes.get("new_tokens", 1)
    return sorted(length for length in {1, page, page + 1, 2 * page, 17, 100, 300, 513} if length >= new)
