"""Page tables on the host: the pages that a batch of rows reads and writes."""

# Shapes: B rows, N entries of the page table, S page size.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from compiled_llm.kvcache.pool import NULL_PAGE


class Stored(Protocol):
    """The fields of a row that a page table needs; ``pages`` as those of a ``Row``."""

    pages: list[int]

    @property
    def exact_length(self) -> int: ...


@dataclass
class Span:
    """The first ``exact_length`` tokens of a row."""

    pages: list[int]
    exact_length: int

    @classmethod
    def null(cls, length: int, page_size: int) -> Span:
        """Return a row of padding, whose tokens all go to the null page."""
        return cls([NULL_PAGE] * -(-length // page_size), length)


class HostTable(NamedTuple):
    """A page table on the host, int32; the columns are those of ``compiled_llm_ops.PageTable``."""

    qo_indptr: NDArray[np.int32]
    indptr: NDArray[np.int32]
    indices: NDArray[np.int32]
    last_page_len: NDArray[np.int32]


def build_table(rows: Sequence[Stored], queries: Sequence[int], page_size: int, padded: int) -> HostTable:
    """Lay out ``rows`` whose last ``queries[b]`` tokens are being computed, padded with null rows to B = ``padded``."""
    # The rows are already grown by these tokens. A null row has one token and query, in the null page.
    # Sums over lists: of numpy, each other function that a first token needs has to come into the caches first.
    null = padded - len(rows)
    laid_out = rows if null == 0 else [*rows, *[Span.null(1, page_size)] * null]
    pages = [row.pages for row in laid_out]
    last = [row.exact_length - (len(row.pages) - 1) * page_size for row in laid_out]
    return HostTable(
        qo_indptr=_starts([*queries, *[1] * null]),
        indptr=_starts(list(map(len, pages))),
        indices=np.array(list(chain.from_iterable(pages)), dtype=np.int32),
        last_page_len=np.array(last, dtype=np.int32),
    )


def _starts(counts: Sequence[int]) -> NDArray[np.int32]:
    return np.array(list(accumulate(counts, initial=0)), dtype=np.int32)
