"""Rows of random keys and values in pages of any layout, with dense attention over them in float64.

Shapes: T packed tokens, L tokens of one row, Q queries of one row, H query heads, K kv heads, D head dimension of
queries and keys, E that of values, P pages, S page size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

UNWRITTEN = float("nan")
"""What lies in slots that no token was written to: it shows if it is read."""


def dense(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    *,
    causal: bool = False,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    mask: Tensor | None = None,
    slopes: Tensor | None = None,
    rope: tuple[float, float] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ``[Q, H, E]`` and the log-sum-exp in base 2 ``[Q, H]``.

    Queries are ``[Q, H, D]``, keys ``[L, K, D]``, values ``[L, K, E]``, ``mask`` is ``[Q, L]``, ``rope`` the scale and
    theta of a rotation.
    """
    queries, heads, length = len(query), query.shape[1], len(keys)
    own = torch.arange(queries) + length - queries
    query, keys, values = query.double(), keys.double(), values.double()
    if rope is not None:
        query, keys = turned(query, own, *rope), turned(keys, torch.arange(length), *rope)
    group = heads // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    logits = torch.einsum("qhd,lhd->qhl", query, keys) * scale
    if slopes is not None:
        distance = torch.arange(length) - torch.arange(queries)[:, None]
        logits = logits + slopes.double()[None, :, None] * distance[:, None]
    if logits_soft_cap:
        logits = logits_soft_cap * torch.tanh(logits / logits_soft_cap)
    seen = torch.ones(queries, length, dtype=torch.bool) if mask is None else mask
    if causal and mask is None:
        seen = seen & (torch.arange(length) <= own[:, None])
    if window_left >= 0:
        seen = seen & (torch.arange(length) >= own[:, None] - window_left)
    logits = logits.masked_fill(~seen[:, None], -math.inf)
    weights = torch.softmax(logits, -1).nan_to_num(0.0)  # of no keys, not a number
    lse = torch.logsumexp(logits, -1) if length else torch.full((queries, heads), -math.inf).double()
    return torch.einsum("qhl,lhd->qhd", weights, values), lse / math.log(2)


def turned(states: Tensor, positions: Tensor, scale: float, theta: float) -> Tensor:
    """Return ``[L, H, D]`` rotated as complex numbers, of which the halves of a head are the parts."""
    half = states.shape[-1] // 2
    angles = positions[:, None].double() / scale * theta ** (-torch.arange(half).double() / half)
    numbers = (
        torch.complex(states[..., :half], states[..., half:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    )
    return torch.cat([numbers.real, numbers.imag], -1)


class StridedRows:
    """Rows with their pages in random order, and tables of them."""

    def __init__(
        self,
        lengths: Sequence[int],
        queries: Sequence[int],
        *,
        heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 16,
        value_dim: int | None = None,
        page_size: int = 4,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        self.lengths, self.counts, self.page_size = list(lengths), list(queries), page_size
        self.heads, self.kv_heads, self.seed = heads, kv_heads, seed
        own = dtype if kv_dtype is None else kv_dtype
        sizes = head_dim, head_dim if value_dim is None else value_dim
        self.query = random(sum(queries), heads, head_dim, dtype=dtype)
        self.keys, self.values = ([random(length, kv_heads, size, dtype=own) for length in lengths] for size in sizes)
        counts = [-(-length // page_size) for length in lengths]
        self.indices = torch.randperm(sum(counts) + 3, generator=generator)[: sum(counts)].int()
        self.qo_indptr, self.indptr = starts_of(queries), starts_of(counts)
        self.last_page_len = torch.tensor(
            [(length - 1) % page_size + 1 if length else 0 for length in lengths], dtype=torch.int32
        )
        self.scale = head_dim**-0.5
        self.pools = tuple(
            self._pool(states, sum(counts) + 3, size)
            for states, size in zip((self.keys, self.values), sizes, strict=True)
        )

    def _pool(self, rows: list[Tensor], pages: int, size: int) -> Tensor:
        """``[P, K, S, D]``."""
        pool = torch.full((pages, self.kv_heads, self.page_size, size), UNWRITTEN).to(rows[0].dtype)
        for row, states in enumerate(rows):
            numbers = self.indices[self.indptr[row] : self.indptr[row + 1]]
            for position, token in enumerate(states):
                pool[numbers[position // self.page_size], :, position % self.page_size] = token
        return pool

    @property
    def table(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.qo_indptr, self.indptr, self.indices, self.last_page_len

    @property
    def ragged(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all rows, ``[N, K, D]``."""
        return torch.cat(self.keys), torch.cat(self.values)

    def layouts(self) -> dict[str, tuple[str, Any]]:
        """The same pages in each layout that FlashInfer has, with the layout's name."""
        keys, values = self.pools
        apart = (keys.transpose(1, 2).contiguous(), values.transpose(1, 2).contiguous())
        layouts: dict[str, tuple[str, Any]] = {"HND, two": ("HND", (keys, values)), "NHD, two": ("NHD", apart)}
        if keys.shape == values.shape:
            whole = torch.stack([keys, values], 1)
            wide = torch.full((*whole.shape[:-1], whole.shape[-1] + 8), UNWRITTEN).to(keys.dtype)
            wide[..., :-8] = whole
            layouts["HND"] = "HND", whole
            layouts["NHD"] = "NHD", whole.transpose(2, 3).contiguous()
            layouts["strided"] = "HND", wide[..., :-8]
            layouts["transposed"] = "NHD", whole.transpose(2, 3)
        return layouts

    def expected(self, masks: Sequence[Tensor] | None = None, **how: Any) -> tuple[Tensor, Tensor]:
        """Return ``[T, H, E]`` and ``[T, H]`` in float64; ``masks`` has one ``[Q, L]`` of each row."""
        parts, begin = [], 0
        for row, count in enumerate(self.counts):
            own = self.query[begin : begin + count]
            mask = None if masks is None else masks[row]
            parts.append(dense(own, self.keys[row], self.values[row], **{"scale": self.scale, **how}, mask=mask))
            begin += count
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])

    def masks(self) -> list[Tensor]:
        """Random ones, ``[Q, L]`` of each row; the first query of a row sees nothing."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        masks = [
            torch.rand(count, length, generator=generator) < 0.6
            for count, length in zip(self.counts, self.lengths, strict=True)
        ]
        for mask in masks:
            mask[:1] = False
        return masks


def packed(masks: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the bytes of masks, and where each row's begin."""
    rows = [bytes_of(mask.flatten().tolist()) for mask in masks]
    return torch.tensor([byte for row in rows for byte in row], dtype=torch.uint8), starts_of(
        [len(row) for row in rows]
    )


def bytes_of(bits: list[bool]) -> list[int]:
    """Eight bits a byte, the first one lowest."""
    return [sum(bit << place for place, bit in enumerate(bits[at : at + 8])) for at in range(0, len(bits), 8)]


def starts_of(counts: Sequence[int]) -> Tensor:
    return torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).int()
