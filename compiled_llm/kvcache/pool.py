"""Page accounting: free, taken, shared, promised and cached pages. Plain numbers on the host, no device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from compiled_llm.compat.forks import lock
from compiled_llm.kvcache.errors import OutOfPagesError
from compiled_llm.kvcache.state_pool import StatePool
from compiled_llm.kvcache.step_validity import StepValidity

logger = logging.getLogger("compiled_llm.pages")

NULL_PAGE = 0
"""Page 0 has no owner: padding rows and padding tokens read and write it."""


class PageAccount(NamedTuple):
    """The pool at one moment; ``used + free + cached`` is always ``total``. The null page is in none of them.

    Cached pages hold beginnings of earlier sequences, and are free for any row that needs them.
    """

    total: int
    used: int
    free: int
    cached: int


class _Tree(Protocol):
    """The methods of a prefix tree that the pool calls."""

    def forget_oldest(self) -> int:
        """Remove the least recently used leaf from the tree and return its page."""
        ...


class RowWatch:
    """A listener to what becomes of a row's tokens; this one does nothing."""

    def begins(self, ids: NDArray[np.int64]) -> None:
        """Hear the tokens that the row begins with."""

    def changed(self, length: int) -> None:
        """Hear that the row has ``length`` tokens now, without having stored the last of them."""

    def lost(self) -> None:
        """Hear that the device no longer has what it had of the row."""

    def shared(self) -> RowWatch:
        """Return the listener to a fork of the row."""
        return self


class PagePool:
    """A pool of pages, which are promised ahead of time so that an admitted row never runs out."""

    # A page may have several owners; it is free again once the last of them gives it back. One of them may be a prefix
    # tree; a page that only the tree owns is cached. It counts as available, and the tree gives it up once no free ones
    # are left.

    def __init__(
        self,
        pages: int,
        page_size: int,
        validity: StepValidity | None = None,
        watch: Callable[[], RowWatch] | None = None,
        states: StatePool | None = None,
    ) -> None:
        self.states = states  # what rows keep besides pages; None if they keep nothing
        # of decode steps. It ends when rows share pages (no row writes into them any more) or forget tokens, but by no
        # call of a tree: that owns full pages, into which no row writes
        self.validity = StepValidity() if validity is None else validity
        self.page_size = page_size
        self.watch = RowWatch if watch is None else watch  # returns what hears of a new row
        self.total = pages - 1
        self.peak_used = 0  # the most pages that rows have owned at one time
        self._free = list(range(pages - 1, NULL_PAGE, -1))
        self._owners = [0] * pages
        self._reserved = 0
        self._tree: _Tree | None = None
        self._in_tree: set[int] = set()
        self._cached = 0  # pages that the tree owns and no row
        # Re-entrant: the garbage collector may give back a dropped row's pages in the middle of any call.
        # a thread that holds it keeps all others from changing anything
        self.lock = lock() if states is None else states.lock

    @property
    def available(self) -> int:
        """Pages neither used nor promised; cached ones are among them."""
        with self.lock:
            return len(self._free) + self._cached - self._reserved

    def lacks(self, pages: int, rows: int) -> bool:
        """Whether pages, or states of so many rows that begin to run, are missing now and may be available later."""
        with self.lock:
            states = self.states is not None and self.states.lacks(rows)
            return states or self.available < pages <= self.total

    def account(self) -> PageAccount:
        """Return how many pages are used, free and cached."""
        with self.lock:
            return PageAccount(self.total, self._used(), len(self._free), self._cached)

    def _used(self) -> int:
        return self.total - len(self._free) - self._cached

    def pages_for(self, tokens: int) -> int:
        """Return how many pages ``tokens`` of one row take."""
        return -(-tokens // self.page_size)

    def filled_by(self, tokens: int) -> int:
        return tokens // self.page_size

    def tokens_in(self, pages: int) -> int:
        """Return how many tokens of one row ``pages`` hold."""
        return pages * self.page_size

    def reserve(self, pages: int) -> None:
        """Promise ``pages`` to a caller; OutOfPagesError if fewer are available."""
        with self.lock:
            if pages > self.available:
                raise OutOfPagesError(f"{pages} pages are needed and {self.available} of {self.total} are available")
            self._reserved += pages

    def take_reserved(self, count: int) -> list[int]:
        """Turn promised pages into taken ones; the tree gives up what is not free."""
        with self.lock:
            self._reserved -= count
            while len(self._free) < count and self._tree is not None:
                self.uncache([self._tree.forget_oldest()])
            pages = [self._free.pop() for _ in range(count)]
            for page in pages:
                self._owners[page] = 1
            self.peak_used = max(self.peak_used, self._used())
        if pages:
            logger.debug("pages %s taken, %d free", pages, len(self._free))
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Count one more owner of each page, which rows own already."""
        with self.lock:
            self.validity.invalidate()
            for page in pages:
                self._owners[page] += 1

    def is_shared(self, page: int) -> bool:
        """Whether a page has more than one owner; then no row may write into it."""
        return self._owners[page] > 1

    def has_one_row(self, page: int) -> bool:
        """Whether a page becomes available when a row that owns it gives it back."""
        return self._owners[page] == (2 if page in self._in_tree else 1)

    def return_to_reserve(self, pages: Sequence[int]) -> int:
        """Turn taken pages back into promised ones, except those that other rows own; return how many."""
        with self.lock:
            self.validity.invalidate()
            back = self._disown(pages)
            self._reserved += back
            return back

    def give_back(self, pages: Iterable[int], reserved: int = 0) -> None:
        """Return taken pages, and promised ones that were never taken."""
        with self.lock:
            self._disown(pages)
            self._reserved -= reserved

    def _disown(self, pages: Iterable[int]) -> int:
        """Remove one owner of each page; return how many are free or cached now."""
        owners, in_tree, back = self._owners, self._in_tree, 0
        for page in pages:
            left = owners[page] = owners[page] - 1
            if left == 0:
                self._free.append(page)
                back += 1
            elif left == 1 and page in in_tree:
                self._cached += 1
                back += 1
        return back

    # ---- a prefix tree's pages. The owners of a page and what they are counted in change with no call in between: in
    # any call the garbage collector may give a page back.

    def cache(self, pages: Sequence[int], tree: _Tree) -> None:
        """Make ``tree`` one more owner of pages that rows own.

        Raises:
            ValueError: a page belongs to no row, is in the tree already or given twice, or another tree has pages of
                this pool; nothing has changed.
        """
        with self.lock:
            if self._in_tree and self._tree is not tree:
                raise ValueError("insert: another prefix tree holds pages of this pool; clear() that one first")
            right = {page for page in pages if self._owners[page] > 0 and page not in self._in_tree}
            if len(right) < len(pages):
                raise ValueError(
                    f"insert: pages {sorted(set(pages) - right)} belong to no row, or are in the tree with other "
                    "tokens before them, or one is given twice"
                )
            self._tree = tree
            for page in pages:
                self._owners[page] += 1
                self._in_tree.add(page)

    def share_cached(self, pages: Sequence[int]) -> int:
        """Make a row one more owner of the first of the tree's ``pages``; return how many."""
        # It stops at the first pages that are cached and promised to other rows.
        with self.lock:
            spare, shared = self.available, 0
            for page in pages:
                if self._owners[page] == 1:
                    if spare <= 0:
                        break
                    spare -= 1
                    self._cached -= 1
                self._owners[page] += 1
                shared += 1
            self.peak_used = max(self.peak_used, self._used())
            return shared

    def uncache(self, pages: Iterable[int]) -> None:
        """Remove the tree as an owner of its ``pages``."""
        with self.lock:
            for page in pages:
                self._owners[page] -= 1
                if self._owners[page] == 0:
                    self._cached -= 1
                    self._free.append(page)
                self._in_tree.remove(page)


class Promise:
    """Pages promised to all rows of one call together: beams share pages, copy them and give them back."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._pages: int | None = None

    @contextmanager
    def reserved(self, pages: int) -> Iterator[None]:
        """Promise ``pages`` for the block; OutOfPagesError if fewer are available."""
        self._pool.reserve(pages)
        self._pages = pages
        try:
            yield
        finally:
            left, self._pages = self._pages, None
            self._pool.give_back((), left)

    @contextmanager
    def drawn_on(self) -> Iterator[None]:
        """Let the block's rows take from the promise, if there is one, and promise again what they give back."""
        # Other rows have as many pages available as before, unless these take more than was promised.
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
