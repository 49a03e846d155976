"""Rows of latents in pages, with attention over them computed densely, in float32, from expanded keys and values.

Shapes: B rows, T packed tokens, L tokens of one row, Q queries of one row, H query heads, R latent size, E size of the
rotated part, P pages, S page size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor

from compiled_llm_ops.contracts.latent import AppendLatent, LatentAttention, LatentDecode, PlannedLatentAttention


class LatentRows:
    """Rows in pages of random order; free pages and slots, and those of new tokens, hold NaN.

    A row of length 0 has no page. The oracle knows contiguous latents alone.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        queries: Sequence[int] | None = None,
        *,
        heads: int = 4,
        rank: int = 32,
        size: int = 16,
        page_size: int = 4,
        chosen: int | None = None,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        self.lengths, self.queries = list(lengths), [1] * len(lengths) if queries is None else list(queries)
        self.rank, self.size, self.scale = rank, size, 1.3 * (rank + size) ** -0.5
        self.states = [random(length, rank + size) for length in lengths]
        self.query = random(sum(self.queries), heads, rank + size)
        counts = [-(-length // page_size) for length in lengths]
        order = (torch.randperm(sum(counts) + 3, generator=generator)[: sum(counts)] + 1).to(device)
        self.pages = torch.full((sum(counts) + 6, page_size, rank + size), torch.nan, dtype=dtype, device=device)
        self.indptr = torch.tensor([sum(counts[:row]) for row in range(len(counts) + 1)], dtype=torch.int32).to(device)
        self.indices = torch.cat([order, order.new_full((7,), sum(counts) + 5)]).int()  # more than rows have
        choice = Random(seed)
        self.chosen = None if chosen is None else [self._choose(at, chosen, choice) for at in self.places[1].tolist()]
        read = None if self.chosen is None else self._read(self.chosen)
        for row, (states, new) in enumerate(zip(self.states, self.queries, strict=True)):
            for at in range(max(0, len(states) - new)):
                if read is None or at in read[row]:
                    self.pages[self._page(row, at), at % page_size] = states[at]

    @staticmethod
    def _choose(own: int, most: int, choice: Random) -> list[int]:
        """A query's tokens in any order, -1 anywhere, and some after its own."""
        chosen = choice.sample(range(own + 3), choice.randint(0, min(most, own + 3)))
        chosen += [-1] * (most - len(chosen))
        choice.shuffle(chosen)
        return chosen

    def _read(self, chosen: list[list[int]]) -> list[set[int]]:
        """The tokens of each row that a query reads; others hold NaN."""
        return [
            {at for own, row in zip(chosen, self.places[0].tolist(), strict=True) if row == this for at in own}
            for this in range(len(self.lengths))
        ]

    @property
    def lists(self) -> Tensor | None:
        if self.chosen is None:
            return None
        return torch.tensor(self.chosen, dtype=torch.int32).to(self.pages.device)

    def _page(self, row: int, at: int) -> int:
        return int(self.indices[int(self.indptr[row]) + at // self.pages.shape[1]])

    @property
    def places(self) -> tuple[Tensor, Tensor]:
        """The row and position of each packed token; queries of rows that are shorter see no key."""
        rows = [row for row, count in enumerate(self.queries) for _ in range(count)]
        positions = [
            max(-1, length - count + query)
            for length, count in zip(self.lengths, self.queries, strict=True)
            for query in range(count)
        ]
        device = self.pages.device
        return torch.tensor(rows).to(device, torch.int32), torch.tensor(positions).to(device, torch.int32)

    @property
    def newest(self) -> tuple[Tensor, Tensor]:
        """Latents and rotated parts of new tokens, as views of one tensor; of rows without tokens NaN."""
        own = [
            self.states[row][at] if at >= 0 else self.query.new_full((self.rank + self.size,), torch.nan)
            for row, at in zip(*(place.tolist() for place in self.places), strict=True)
        ]
        latent, rope = torch.stack(own).split([self.rank, self.size], dim=-1)
        return latent, rope

    @property
    def queries_of(self) -> tuple[Tensor, Tensor]:
        latent, rope = self.query.split([self.rank, self.size], dim=-1)
        return latent, rope

    def append_arguments(self) -> AppendLatent:
        return AppendLatent(*self.newest, self.pages.clone(), *self.places, self.indptr, self.indices)

    def arguments(self) -> LatentAttention:
        table = (*self.places, self.indptr, self.indices)
        return LatentAttention(*self.queries_of, self.written(), *table, self.scale, self.lists)

    def planned_arguments(self, plan: Tensor | None = None, workspace: Tensor | None = None) -> PlannedLatentAttention:
        """Of rows that have tokens; on a CPU without a plan."""
        none = torch.zeros(0, dtype=torch.uint8, device=self.pages.device)
        plan, workspace = none if plan is None else plan, none if workspace is None else workspace
        starts, last = (column.to(self.pages.device) for column in self.host_columns[::2])
        table = (starts, self.indptr, self.indices, last)
        return PlannedLatentAttention(*self.queries_of, self.written(), *table, plan, workspace, self.scale)

    @property
    def host_columns(self) -> tuple[Tensor, Tensor, Tensor]:
        """Where queries and pages begin, and tokens in last pages."""
        starts = [sum(self.queries[:row]) for row in range(len(self.queries) + 1)]
        size = self.pages.shape[1]
        last = [(length - 1) % size + 1 for length in self.lengths]
        return (torch.tensor(starts, dtype=torch.int32), self.indptr.cpu(), torch.tensor(last, dtype=torch.int32))

    def decode_arguments(self) -> LatentDecode:
        lengths = torch.tensor(self.lengths, dtype=torch.int32).to(self.pages.device)
        table = (self.indptr[:-1].contiguous(), lengths, self.indices)
        return LatentDecode(*self.queries_of, *self.newest, self.pages.clone(), *table, self.scale, chosen=self.lists)

    def written(self) -> Tensor:
        """The pages with the new tokens."""
        pages = self.pages.clone()
        for row, at in zip(*(place.tolist() for place in self.places), strict=True):
            if at >= 0:
                pages[self._page(row, at), at % pages.shape[1]] = self.states[row][at]
        return pages

    def expected(self) -> tuple[Tensor, Tensor]:
        """`[T, H, R]` and the log-sum-exp `[T, H]` in base 2, one query after the other."""
        outs, lses = [], []
        for token, (row, at) in enumerate(zip(*(place.tolist() for place in self.places), strict=True)):
            keys = self.states[row][: at + 1].float()
            if self.chosen is not None:
                keys = keys[[own for own in self.chosen[token] if 0 <= own <= at]]
            if not len(keys):
                outs.append(self.query.new_zeros((self.query.shape[1], self.rank), dtype=torch.float32))
                lses.append(outs[-1].new_full((self.query.shape[1],), -math.inf))
                continue
            logits = torch.einsum("hd,ld->hl", self.query[token].float(), keys) * self.scale
            outs.append(torch.softmax(logits, -1) @ keys[:, : self.rank])
            lses.append(torch.logsumexp(logits, -1) / math.log(2))
        return torch.stack(outs), torch.stack(lses)


Attend = Callable[[Any], tuple[Tensor, Tensor]]


def check_any_batch(rows: LatentRows, attend: Attend, decode: Attend, seed: int, times: int = 4) -> None:
    """Tokens of rows that are all new have the bits of each row alone: any of them, in any batch, in decode, too."""
    args, chance = rows.arguments()._replace(invariant=True), Random(seed)
    begins = [sum(rows.lengths[:row]) for row in range(len(rows.lengths))]

    def some(numbers: Sequence[int]) -> LatentAttention:
        at = torch.tensor(numbers, device=args.pages.device)
        return args._replace(**{name: getattr(args, name)[at] for name in args._fields[:2] + args._fields[3:5]})

    alone = [attend(some(range(begin, begin + count))) for begin, count in zip(begins, rows.lengths, strict=True)]
    wanted = [torch.cat(own) for own in zip(*alone, strict=True)]
    torch.testing.assert_close(wanted[0].float(), rows.expected()[0], rtol=2e-2, atol=1e-2)
    for _ in range(times):
        spans = []
        for row in chance.sample(range(len(begins)), chance.randint(1, len(begins))):
            start = chance.randrange(rows.lengths[row])
            spans.append(range(begins[row] + start, begins[row] + chance.randint(start, rows.lengths[row] - 1) + 1))
        numbers = [number for span in spans for number in span]
        newest = [span[-1] for span in spans]
        given, (row, position) = some(newest), (places[newest] for places in rows.places)
        states = rows.newest[0][newest], rows.newest[1][newest]
        table = rows.indptr[row.long()], position + 1, rows.indices
        pages = args.pages.clone()
        decoded = decode(LatentDecode(*given[:2], *states, pages, *table, rows.scale, False, None, True))
        assert torch.equal(pages.nan_to_num(9.0), args.pages.nan_to_num(9.0)), "what is written was there already"
        for found, own in ((attend(some(numbers)), numbers), (decoded, newest)):
            for result, whole in zip(found, wanted, strict=True):
                assert torch.equal(result, whole[own]), own


MIXES = {
    "one token": ([1], [1]),
    "borders of pages": ([3, 4, 5, 8, 9, 1], [1, 1, 1, 1, 1, 1]),
    "new rows": ([7, 1, 12], [7, 1, 12]),
    "continued rows": ([9, 13, 30], [2, 5, 1]),
    "rows without new tokens": ([9, 5, 6, 4], [2, 0, 6, 0]),
    "rows without tokens": ([0, 5, 0, 9], [1, 2, 2, 1]),
}


class RaggedRows:
    """Rows of tokens with expanded queries, keys and values; the oracle computes one row after the other."""

    def __init__(
        self,
        counts: Sequence[int],
        *,
        heads: int = 4,
        key_heads: int | None = None,
        head_dim: int = 48,
        value_dim: int = 32,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def random(own: int, size: int) -> Tensor:
            """Strides of a layer's, whose tokens are not its first dimension."""
            return torch.randn(own, sum(counts), size, generator=generator).to(device, dtype).transpose(0, 1)

        key_heads = heads if key_heads is None else key_heads
        self.counts, self.scale = counts, 1.3 * head_dim**-0.5
        self.query, self.key, self.value = (
            random(heads, head_dim),
            random(key_heads, head_dim),
            random(key_heads, value_dim),
        )
        starts = [sum(counts[:row]) for row in range(len(counts) + 1)]
        self.qo_indptr = torch.tensor(starts, dtype=torch.int32).to(device)

    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
        return self.query, self.key, self.value, self.qo_indptr, self.scale

    def expected(self) -> tuple[Tensor, Tensor]:
        """`[T, H, E]` and the log-sum-exp `[T, H]` in base 2."""
        group = self.query.shape[1] // self.key.shape[1]
        outs, lses = [], []
        for query, key, value in zip(
            *(states.float().split(self.counts) for states in (self.query, self.key, self.value)), strict=True
        ):
            key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
            logits = torch.einsum("qhd,lhd->qhl", query, key) * self.scale
            seen = torch.ones(len(query), len(query), dtype=torch.bool, device=query.device).tril()
            logits = logits.masked_fill(~seen[:, None], -math.inf)
            outs.append(torch.einsum("qhl,lhe->qhe", torch.softmax(logits, -1), value))
            lses.append(torch.logsumexp(logits, -1) / math.log(2))
        return torch.cat(outs), torch.cat(lses)


RAGGED = {
    "one token": [1],
    "borders of tiles": [63, 64, 65, 1, 127, 128, 129],
    "rows without tokens": [0, 5, 0, 0, 200, 0],
}
