"""The tensors of a case: queries, pages full of random keys and values, and the page table, here and on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import torch
from cold_launches import LARGER_THAN_CACHES, copies_of
from torch import Tensor

from attention_ops.cases import SEED, Case, Heads, Row
from compiled_llm_ops.contracts import PageTable

PAGE_SIZE = 16
MAX_KEYS = 40_960
"""Keys that a row of Qwen3 can have; page tables have room for these, as an engine's have."""
MOST_COPIES = 511
MOST_MEMORY = 0.4
"""The share of the free memory that pages may take: some contenders need theirs in another form, beside them."""


Launch: TypeAlias = Callable[[int], Sequence[Tensor]]
"""Attends once, over the copy of the pages that a number names; returns ``[T, H, D]``, in parts or whole."""


class TooLargeError(Exception):
    """The pages of a case do not fit; says so."""


class Part(NamedTuple):
    """Some rows of a case, next to each other, as if they were a batch of their own.

    Attributes:
        rows: their sizes.
        query: ``[T, H, D]``, contiguous.
        host: their page table on the host; ``indices`` has no more than they need.
        device: the same on the device.
        lengths: ``[B]`` int32 on the device, keys of each row.
    """

    rows: tuple[Row, ...]
    query: Tensor
    host: PageTable
    device: PageTable
    lengths: Tensor


class Inputs:
    """The tensors of a case.

    Attributes:
        pages: copies of one ``[P, 2, K, S, D]``, contiguous, so many that no cache holds all; keys of new tokens are in
            it, too.
        whole: all rows.
        one_each: the rows with one new token, at the beginning; None if there are none.
        others: the rows after those; None if there are none.
    """

    def __init__(self, case: Case, heads: Heads, device: torch.device, dtype: torch.dtype) -> None:
        """Raises ``TooLargeError``."""
        self.case, self.heads, self.device, self.dtype = case, heads, device, dtype
        self._counts, shared = [-(-row.keys // PAGE_SIZE) for row in case.rows], case.shared // PAGE_SIZE
        size = (sum(self._counts) - shared * (len(case.rows) - 1), 2, heads.kv, PAGE_SIZE, heads.dim)
        self._check_room(torch.Size(size).numel() * dtype.itemsize)
        # Generators of its own: torch's own one may be left in disorder by a capture that fails.
        random = torch.Generator(device).manual_seed(SEED)
        pages = torch.randn(size, generator=random, device=device, dtype=dtype)
        self.pages = copies_of(pages, most=MOST_COPIES if device.type == "cuda" else 1)
        query = (case.tokens, heads.query, heads.dim)
        self._query = torch.randn(query, generator=random, device=device, dtype=dtype)
        order = torch.randperm(size[0], generator=torch.Generator().manual_seed(SEED)).int()
        owned = order[shared:].split([count - shared for count in self._counts])
        self._numbers = [torch.cat([order[:shared], own]) for own in owned]
        single = sum(row.new == 1 for row in case.rows)
        self.whole = self._part(0, len(case.rows))
        self.one_each = self._part(0, single) if single else None
        self.others = self._part(single, len(case.rows)) if single < len(case.rows) else None

    @property
    def scale(self) -> float:
        return float(self.heads.dim**-0.5)

    def newest(self, part: Part) -> tuple[Tensor, Tensor]:
        """Return the newest key and value of each row ``[B, K, D]``: what is written again changes nothing."""
        last = part.device.indices[(part.device.indptr[1:] - 1).long()].long()
        both = self.pages[0][last, :, :, (part.device.last_page_len - 1).long()]
        return both[:, 0].contiguous(), both[:, 1].contiguous()

    def with_room(self, part: Part) -> Tensor:
        """Return the page numbers with room for rows of ``MAX_KEYS``."""
        indices, room = part.device.indices, len(part.rows) * MAX_KEYS // PAGE_SIZE
        return torch.nn.functional.pad(indices, (0, max(0, room - len(indices))))

    def _part(self, first: int, end: int) -> Part:
        rows, counts = self.case.rows[first:end], self._counts[first:end]
        tokens = sum(row.new for row in self.case.rows[:first])
        columns = (
            list(accumulate((row.new for row in rows), initial=0)),
            list(accumulate(counts, initial=0)),
            [(row.keys - 1) % PAGE_SIZE + 1 for row in rows],
            [row.keys for row in rows],
        )
        starts, indptr, last, lengths = (torch.tensor(column, dtype=torch.int32) for column in columns)
        host = PageTable(starts, indptr, torch.cat(self._numbers[first:end]), last)
        device = PageTable(*(column.to(self.device) for column in host))
        query = self._query[tokens : tokens + int(starts[-1])]
        return Part(rows, query, host, device, lengths.to(self.device))

    def _check_room(self, size: int) -> None:
        if self.device.type != "cuda":
            return
        needed = size + min(size * MOST_COPIES, LARGER_THAN_CACHES)
        free = torch.cuda.mem_get_info(self.device)[0]
        if needed > MOST_MEMORY * free:
            raise TooLargeError(
                f"its pages take {needed / 1e9:.1f} GB, over {MOST_MEMORY:.0%} of the {free / 1e9:.1f} GB free"
            )
