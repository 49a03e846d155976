"""Rows whose attention is to have the same bits however they are batched and cut, on any device.

Shapes: L tokens of a row, Q queries of a row, H query heads, K kv heads, D head dimension, P pages, S page size.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_llm_ops import invariant_attention_lse, paged_attention_lse
from compiled_llm_ops.backends import INVARIANT, backend_named
from compiled_llm_ops.contracts import PagedAttention
from support.ops.op_cases import Batch


class Span(NamedTuple):
    """Queries of a row: its tokens from `start` to `end`, of which the last is its newest."""

    row: int
    start: int
    end: int


Attend = Callable[[PagedAttention], tuple[Tensor, Tensor]]


def by_plan(args: PagedAttention) -> tuple[Tensor, Tensor]:
    """The op with a plan of the backend."""
    backend = backend_named(INVARIANT)
    plan = backend.new_plan(backend.workspace(args.query.device, 0), 0)
    return paged_attention_lse(*args._replace(plan=plan.tensor))


class InvariantRows:
    """Random rows in pages, in random order among free ones, which hold NaN."""

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        group: int = 2,
        kv_heads: int = 2,
        head_dim: int = 16,
        stored: int | None = None,
        page_size: int = 4,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        **options: Any,
    ) -> None:
        self.lengths, self.page_size, self.options, self.device = list(lengths), page_size, options, device
        self.states = [torch.randn(length, (group + 2) * kv_heads, head_dim).to(dtype) for length in lengths]
        self.sizes = group, kv_heads, head_dim
        counts = [-(-length // page_size) for length in lengths]
        self.own = [numbers.tolist() for numbers in torch.randperm(sum(counts)).split(counts)]
        self.pages = torch.full((sum(counts) + 3, 2, kv_heads, page_size, stored or head_dim), torch.nan, dtype=dtype)
        self.pages[..., head_dim:] = 0
        for row in range(len(self.lengths)):
            self.write(Span(row, 0, self.lengths[row]))
        self.pages = self.pages.to(device)

    def heads(self, span: Span) -> tuple[Tensor, Tensor, Tensor]:
        group, kv_heads, _ = self.sizes
        query, key, value = self.states[span.row][span.start : span.end].split(
            [group * kv_heads, kv_heads, kv_heads], 1
        )
        return query, key, value

    def write(self, span: Span) -> None:
        head_dim = self.sizes[2]
        for at, parts in enumerate(zip(*self.heads(span)[1:], strict=True), span.start):
            page = self.pages[self.own[span.row][at // self.page_size]]
            for part, state in zip(page, parts, strict=True):
                part[:, at % self.page_size, :head_dim] = state

    def numbers(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def prefill(self, spans: Sequence[Span], attend: Attend = by_plan) -> list[tuple[Tensor, Tensor]]:
        """Results and log-sum-exps of each span, in one launch."""
        own = [self.own[span.row][: -(-span.end // self.page_size)] for span in spans]
        query = torch.cat([self.heads(span)[0] for span in spans]).to(self.device)
        counts, unread = [span.end - span.start for span in spans], torch.empty(0, dtype=torch.uint8)
        last = [(span.end - 1) % self.page_size + 1 for span in spans]
        table = (
            self.numbers([0, *torch.tensor(counts).cumsum(0).tolist()]),
            self.numbers([0, *torch.tensor(list(map(len, own))).cumsum(0).tolist()]),
            self.numbers(list(chain(*own))),
            self.numbers(last),
        )
        out, lse = attend(PagedAttention(query, self.pages, *table, unread, unread, self.scale, **self.options))
        return list(zip(out.split(counts), lse.split(counts), strict=True))

    def decode(self, spans: Sequence[Span], attend: Any = invariant_attention_lse) -> list[tuple[Tensor, Tensor]]:
        """The same by the op that writes the spans' keys and values first, for spans of equal sizes."""
        states = [torch.cat(parts).to(self.device) for parts in zip(*map(self.heads, spans), strict=True)]
        spare = 2  # page numbers that a row will need may stand behind those that it has
        own = [[*self.own[span.row][: -(-span.end // self.page_size)], *[0] * spare] for span in spans]
        starts = self.numbers([0, *torch.tensor(list(map(len, own))).cumsum(0).tolist()][:-1])
        lengths, indices = self.numbers([span.end for span in spans]), self.numbers(list(chain(*own)))
        pages = self.pages.clone()
        out, lse = attend(*states, pages, starts, lengths, indices, self.scale, **self.options)
        assert torch.equal(pages.nan_to_num(9.0), self.pages.nan_to_num(9.0)), "what is written was there already"
        count = spans[0].end - spans[0].start
        return list(zip(out.split(count), lse.split(count), strict=True))

    @property
    def scale(self) -> float:
        return float(self.sizes[2] ** -0.5)

    def expected(self, span: Span) -> Tensor:
        """`[Q, H, D]` by HuggingFace's eager attention in float32."""
        group, kv_heads, head_dim = self.sizes
        dense = Batch([span.end], [span.end - span.start], group=group, kv_heads=kv_heads, head_dim=head_dim)
        whole = Span(span.row, 0, span.end)
        dense.query, dense.keys, dense.values = self.heads(span)[0], [self.heads(whole)[1]], [self.heads(whole)[2]]
        return dense.expected(self.scale, self.options.get("window_left", -1), self.options.get("logits_soft_cap", 0.0))

    def alone(self, attend: Attend = by_plan) -> list[tuple[Tensor, Tensor]]:
        """Each row alone, all of its tokens at once."""
        return [self.prefill([Span(row, 0, length)], attend)[0] for row, length in enumerate(self.lengths)]

    def check(self, spans: Sequence[Span], found: Sequence[tuple[Tensor, Tensor]], alone: Any) -> None:
        """Each span has the bits that its row has alone."""
        for span, results in zip(spans, found, strict=True):
            for result, whole in zip(results, alone[span.row], strict=True):
                assert torch.equal(result, whole[span.start : span.end]), span

    def check_all_ways(
        self, seed: int, attend: Attend = by_plan, decode: Any = invariant_attention_lse, batches: int = 6
    ) -> None:
        """Rows in random batches, of random parts; and as decode steps, of one token or several."""
        rng, alone = random.Random(seed), self.alone(attend)
        for row, (out, _) in enumerate(alone):
            expected = self.expected(Span(row, 0, self.lengths[row]))
            tolerance = 1e-5 if out.dtype == torch.float32 else 1e-2
            torch.testing.assert_close(out.float().cpu(), expected, rtol=tolerance, atol=tolerance)
        for _ in range(batches):
            spans = []
            for row in rng.sample(range(len(self.lengths)), rng.randint(1, len(self.lengths))):
                start, end = sorted(rng.sample(range(self.lengths[row] + 1), 2))
                spans.append(Span(row, start, end))
            self.check(spans, self.prefill(spans, attend), alone)
            count = rng.choice([1, 1, 3])
            ends = [(span.row, max(span.end, count)) for span in spans if self.lengths[span.row] >= count]
            spans = [Span(row, end - count, end) for row, end in ends]
            if spans:
                self.check(spans, self.decode(spans, decode), alone)
