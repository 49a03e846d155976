"""Requests that share keys by levels, with their own keys last, in one pool of pages; dense attention over all."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from support.flashinfer_api.strided_rows import StridedRows, dense, starts_of

LEVELS = [[9], [7, 13], [3, 4, 5, 1, 8]]
"""Keys of each level's rows; the last ones are the requests'."""
MEMBERS = [[5], [3, 2], [1] * 5]
"""Requests of each level's rows."""
QUERIES = [1, 4, 2, 1, 3]


class Levels:
    """Levels of rows in one pool of pages."""

    def __init__(
        self,
        levels: int = 3,
        queries: list[int] = QUERIES,
        page_size: int = 4,
        head_dim: int = 16,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        self.lengths, self.members = LEVELS[-levels:], MEMBERS[-levels:]
        self.queries, self.page_size = queries, page_size
        segments = [*itertools.chain(*self.lengths)]
        sizes: dict[str, Any] = {"page_size": page_size, "head_dim": head_dim, "dtype": dtype}
        self.rows = StridedRows(segments, [0] * len(segments), **sizes, seed=seed)
        generator = torch.Generator().manual_seed(seed + 1)
        self.query = torch.randn(sum(queries), 4, head_dim, generator=generator).to(dtype)

    def tables(self) -> list[list[Tensor]]:
        """FlashInfer's four lists."""
        rows, first, found = self.rows, 0, []
        for lengths, members in zip(self.lengths, self.members, strict=True):
            end, request, counts = first + len(lengths), 0, []
            for count in members:
                counts.append(sum(self.queries[request : request + count]))
                request += count
            pages = rows.indptr[first : end + 1]
            own = rows.indices[int(pages[0]) : int(pages[-1])]
            found.append([starts_of(counts), pages - pages[0], own, rows.last_page_len[first:end]])
            first = end
        return [list(column) for column in zip(*found, strict=True)]

    def plan(self, **how: Any) -> dict[str, Any]:
        names = ("qo_indptr_arr", "paged_kv_indptr_arr", "paged_kv_indices_arr", "paged_kv_last_page_len")
        tables = dict(zip(names, self.tables(), strict=True))
        heads = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": self.query.shape[2]}
        return {**tables, **heads, "page_size": self.page_size, "q_data_type": self.query.dtype, **how}

    def expected(self, **how: Any) -> Tensor:
        found, begin = [], 0
        for request, count in enumerate(self.queries):
            own, first = [], 0
            for lengths, members in zip(self.lengths, self.members, strict=True):
                row = next(row for row in range(len(members)) if request < sum(members[: row + 1]))
                own.append(first + row)
                first += len(lengths)
            keys, values = (torch.cat([states[row] for row in own]) for states in (self.rows.keys, self.rows.values))
            found.append(dense(self.query[begin : begin + count], keys, values, self.rows.scale, **how)[0])
            begin += count
        return torch.cat(found)
