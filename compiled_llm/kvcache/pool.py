"""Which pages belong to which row: host facts only, plain numbers, no device.

Shapes: B rows, N entries of the page table, S page size.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger("compiled_llm.pages")

NULL_PAGE = 0
"""Page 0 belongs to nobody: padding rows and padding tokens read and write it."""


class OutOfPagesError(RuntimeError):
    """There are not enough free pages; nothing was taken."""


class PageAccount(NamedTuple):
    """The pool at one moment; ``used + free + cached`` is always ``total``. The null page is in none of them."""

    total: int
    used: int
    free: int
    cached: int


class PageCopy(NamedTuple):
    """A page that a row stopped sharing: what ``source`` holds has to be in ``target`` before the row writes there."""

    source: int
    target: int


class PagePool:
    """Hands out pages, and promises them ahead of time so that a row that was let in never runs out.

    A page may have several owners; it is free again once the last of them gives it back.

    Attributes:
        page_size: tokens in a page.
        total: how many pages there are.
        changes: how often pages that somebody has were shared or given back.
        lock: whoever has it sees no other thread change anything.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        """Start with all of ``pages`` free, except the null page."""
        self.page_size = page_size
        self.total = pages - 1
        self._free = list(range(pages - 1, NULL_PAGE, -1))
        self._owners = [0] * pages
        self._reserved = 0
        self.changes = 0
        # Re-entrant: the garbage collector may give back a dropped row's pages in the middle of any call.
        self.lock = threading.RLock()

    @property
    def available(self) -> int:
        """Pages neither used nor promised."""
        with self.lock:
            return len(self._free) - self._reserved

    def account(self) -> PageAccount:
        """Return how many pages are used, free and cached."""
        with self.lock:
            return PageAccount(self.total, self.total - len(self._free), len(self._free), 0)

    def pages_for(self, tokens: int) -> int:
        """Return how many pages ``tokens`` of one row take."""
        return -(-tokens // self.page_size)

    def reserve(self, pages: int) -> None:
        """Promise ``pages`` to a caller.

        Raises:
            OutOfPagesError: fewer are available.
        """
        with self.lock:
            if pages > self.available:
                raise OutOfPagesError(f"{pages} pages are needed and {self.available} of {self.total} are available")
            self._reserved += pages

    def take_reserved(self, count: int) -> list[int]:
        """Turn promised pages into taken ones."""
        with self.lock:
            self._reserved -= count
            pages = [self._free.pop() for _ in range(count)]
            for page in pages:
                self._owners[page] = 1
        if pages:
            logger.debug("pages %s taken, %d free", pages, len(self._free))
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Count one more owner of each page."""
        with self.lock:
            self.changes += 1
            for page in pages:
                self._owners[page] += 1

    def is_shared(self, page: int) -> bool:
        """Whether a page has more than one owner."""
        return self._owners[page] > 1

    def untake(self, pages: Sequence[int]) -> int:
        """Turn taken pages back into promised ones, except those that have other owners; returns how many."""
        with self.lock:
            freed = self._disown(pages)
            self._reserved += freed
            return freed

    def give_back(self, pages: Iterable[int], reserved: int = 0) -> None:
        """Return taken pages, and promised ones that were never taken."""
        with self.lock:
            self._disown(pages)
            self._reserved -= reserved

    def _disown(self, pages: Iterable[int]) -> int:
        before = len(self._free)
        self.changes += 1
        for page in pages:
            self._owners[page] -= 1
            if self._owners[page] == 0:
                self._free.append(page)
        return len(self._free) - before


class Promise:
    """Pages promised to the rows of one call together: as beams, they share pages, copy them and give them back."""

    def __init__(self, pool: PagePool) -> None:
        """Promise nothing yet."""
        self._pool = pool
        self._pages: int | None = None

    @contextmanager
    def held(self, pages: int) -> Iterator[None]:
        """Promise ``pages`` for the block.

        Raises:
            OutOfPagesError: fewer are available.
        """
        self._pool.reserve(pages)
        self._pages = pages
        try:
            yield
        finally:
            left, self._pages = self._pages, None
            self._pool.give_back((), left)

    @contextmanager
    def drawn_on(self) -> Iterator[None]:
        """Let the block's rows take from the promise, where one is held, and promise again what they give back.

        Others have as many pages available as before, unless the rows take more than was promised.
        """
        if self._pages is None:
            yield
            return
        pool = self._pool
        with pool.lock:
            before = pool.available
            pool.give_back((), self._pages)
            try:
                yield
            finally:
                self._pages = max(0, pool.available - before)
                pool.reserve(self._pages)


class Row:
    """One sequence: its pages, how many tokens they hold, and the position of the next token.

    Rows may share pages. Full pages are only read; the last one is copied before a row writes into it.

    Attributes:
        pages: page numbers, in order.
        length: tokens stored.
        position: rotary position of the next token; equals ``length`` unless the caller numbers tokens differently.
        slot: its entry in the sampling tables; None where the row is greedy.
    """

    def __init__(self, pool: PagePool, tokens: int) -> None:
        """Promise pages for ``tokens``.

        Raises:
            ValueError: ``tokens`` is negative.
            OutOfPagesError: the pool cannot promise that many; nothing changed.
        """
        if tokens < 0:
            raise ValueError(f"a row cannot have room for {tokens} tokens")
        self._pool = pool
        self._reserved = pool.pages_for(tokens)
        pool.reserve(self._reserved)
        self.pages: list[int] = []
        self.length = 0
        self.position = 0
        self.slot: int | None = None
        self._free_slots: list[int] = []

    @property
    def limit(self) -> int:
        """Tokens that the row's pages, taken and promised, can hold."""
        return (len(self.pages) + self._reserved) * self._pool.page_size

    @property
    def room(self) -> int:
        """Tokens that the row can grow by before it enters another page."""
        return len(self.pages) * self._pool.page_size - self.length

    def reserve(self, tokens: int) -> None:
        """Have room for ``tokens`` in all.

        Raises:
            OutOfPagesError: the pool cannot promise the pages that are missing; nothing changed.
        """
        missing = self._pool.pages_for(tokens) - len(self.pages) - self._reserved
        if missing > 0:
            self._pool.reserve(missing)
            self._reserved += missing

    def missing(self, tokens: int, kept: int | None = None) -> int:
        """Return how many pages it takes to hold ``tokens`` in all, beyond those taken and promised.

        Args:
            tokens: all that the row shall hold.
            kept: how many of its present tokens stay; all where None.
        """
        pool, kept = self._pool, self.length if kept is None else kept
        held = pool.pages_for(kept)
        back = sum(not pool.is_shared(page) for page in self.pages[held:])
        copied = tokens > kept and self._writes_into_shared(kept)
        return max(0, pool.pages_for(tokens) - held - self._reserved - back) + copied

    def _writes_into_shared(self, length: int) -> bool:
        full, begun = divmod(length, self._pool.page_size)
        return begun > 0 and self._pool.is_shared(self.pages[full])

    def grow(self, tokens: int) -> PageCopy | None:
        """Count ``tokens`` more as stored, taking promised pages as they are entered.

        Returns:
            What has to be copied before the new tokens are written, where the last page was shared.

        Raises:
            OutOfPagesError: pages that were not promised are needed and not free; nothing changed.
        """
        copies = tokens > 0 and self._writes_into_shared(self.length)  # asked once: other threads may fork and free
        if tokens <= self.room and not copies:  # as most rows do in most steps
            self.length += tokens
            return None
        missing = max(0, self._pool.pages_for(self.length + tokens) - len(self.pages) - self._reserved) + copies
        if missing:
            self._pool.reserve(missing)
            self._reserved += missing
        copy = self._unshare() if copies else None
        self.length += tokens
        self.pages += self._take(max(0, self._pool.pages_for(self.length) - len(self.pages)))
        return copy

    def begin_as(self, other: Row, tokens: int) -> int:
        """Have the first tokens of a row that is about to store them, in the same pages; this one is empty so far.

        Args:
            other: an empty row with room for them, which grows by them before this row is computed, or with it.
            tokens: how many both begin with; shared are as many as fill pages, and at least one is not.

        Returns:
            How many are shared.
        """
        full = (tokens - 1) // self._pool.page_size
        other.pages += other._take(max(0, full - len(other.pages)))
        self._pool.share(other.pages[:full])
        self.pages = other.pages[:full]
        self.length = self.position = full * self._pool.page_size
        return self.length

    def _unshare(self) -> PageCopy:
        """Give the last page a copy of its own."""
        (own,) = self._take(1)
        copy = PageCopy(self.pages[-1], own)
        self.pages[-1] = copy.target
        self._pool.give_back([copy.source])
        return copy

    def _take(self, count: int) -> list[int]:
        self._reserved -= count
        return self._pool.take_reserved(count)

    def fork(self) -> Row:
        """Return another row with the same tokens in the same pages, and with no more pages promised."""
        row = Row(self._pool, 0)
        self._pool.share(self.pages)
        row.pages, row.length, row.position = list(self.pages), self.length, self.position
        return row

    def mark(self) -> tuple[int, int]:
        """Return what ``restore`` needs to undo growth."""
        return self.length, self._reserved + len(self.pages)

    def restore(self, mark: tuple[int, int]) -> None:
        """Undo all growth since ``mark``, and the promises made for it; a page that was copied stays the row's own."""
        length, pages = mark
        self.shrink(self.length - length)
        extra = max(0, self._reserved + len(self.pages) - pages)  # fewer where others hold some of the pages
        self._pool.give_back((), reserved=extra)
        self._reserved -= extra

    def shrink(self, tokens: int) -> None:
        """Forget the last ``tokens``; pages left empty and not shared become promised ones again.

        Raises:
            ValueError: the row does not hold that many.
        """
        if not 0 <= tokens <= self.length:
            raise ValueError(f"a row of {self.length} tokens cannot forget {tokens}")
        self.length -= tokens
        keep = self._pool.pages_for(self.length)
        self._reserved += self._pool.untake(self.pages[keep:])
        del self.pages[keep:]

    def rewind(self, length: int) -> None:
        """Forget all tokens after the first ``length``.

        Raises:
            ValueError: the row is shorter than that.
        """
        extra = self.length - length
        self.shrink(extra)
        self.position -= extra

    def settle(self) -> None:
        """Give back the pages that were promised and not taken, and the entry of the sampling tables."""
        self.leave_slot()
        self._pool.give_back((), self._reserved)
        self._reserved = 0

    def take_slot(self, free: list[int]) -> None:
        """Take an entry of the sampling tables; ``free`` gets it back with the pages, or from ``leave_slot``."""
        self._free_slots = free
        self.slot = free.pop()

    def leave_slot(self) -> None:
        """Give the entry of the sampling tables back, if there is one."""
        if self.slot is not None:
            self._free_slots.append(self.slot)
            self.slot = None

    def free(self) -> None:
        """Give all pages back; the row holds nothing afterwards, and freeing it again does nothing."""
        self.leave_slot()
        pages, reserved = self.pages, self._reserved
        self.pages, self._reserved, self.length, self.position = [], 0, 0, 0
        self._pool.give_back(pages, reserved)


class Stored(Protocol):
    """What a page table needs to know of a row."""

    pages: list[int]
    length: int


@dataclass
class Span:
    """The first ``length`` tokens of a row."""

    pages: list[int]
    length: int

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
    """Lay out ``rows`` whose last ``queries[b]`` tokens are being computed, padded with null rows.

    A null row has one query and one token, in the null page.

    Args:
        rows: already grown by their new tokens.
        queries: new tokens of each row.
        page_size: S.
        padded: B, at least ``len(rows)``.
    """
    null = padded - len(rows)
    pages = [row.pages for row in rows] + [[NULL_PAGE]] * null
    indptr = _starts([len(own) for own in pages])
    lengths = np.array([row.length for row in rows] + [1] * null, dtype=np.int32)
    return HostTable(
        qo_indptr=_starts([*queries, *[1] * null]),
        indptr=indptr,
        indices=np.fromiter(chain.from_iterable(pages), dtype=np.int32, count=indptr[-1]),
        last_page_len=lengths - (np.diff(indptr) - 1) * np.int32(page_size),
    )


def _starts(counts: Sequence[int]) -> NDArray[np.int32]:
    starts = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    return starts
