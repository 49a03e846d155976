"""Accounts of pages, and of entries for states: free, taken, shared, promised and cached. Numbers on the host alone."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from compiled_llm.compat.forks import lock
from compiled_llm.kvcache.errors import OutOfPagesError, OutOfStatesError
from compiled_llm.kvcache.step_validity import StepValidity

logger = logging.getLogger("compiled_llm.pages")

ENTRIES_OF_A_ROW = 2
"""While it runs: the state that a step reads, and the one that it writes."""

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


class OwnedNumbers:
    """Numbers that are promised ahead of time, so that an admitted row never runs out."""

    # A number may have several owners; it is free again once the last of them gives it back. One of them may be a
    # prefix tree; a number that only the tree owns is cached. It counts as available, and the tree gives it up once no
    # free ones are left.

    things: str  # what they are of, in logs

    def __init__(self, free: list[int], validity: StepValidity | None, lock: threading.RLock) -> None:
        """``validity`` of decode steps ends when rows share numbers: no row writes there any more."""
        self.total = len(free)
        self.validity = StepValidity() if validity is None else validity
        self.peak_used = 0  # the most numbers that rows have owned at one time
        self._free = free
        self._owners = [0] * (max(free, default=0) + 1)
        self._reserved = 0
        self._tree: Any = None
        self._in_tree: set[int] = set()
        self._cached = 0  # numbers that the tree owns and no row
        # A thread that holds it keeps all others from changing anything. It is re-entrant, since the garbage collector
        # may give back what a dropped row has in the middle of any call.
        self.lock = lock

    def _forget_one(self) -> int:
        """Have the tree forget a number that no row owns, the least recently used one, and return it."""
        raise NotImplementedError

    def _too_few(self, count: int) -> OutOfPagesError:
        """Return the error of a promise of so many."""
        raise NotImplementedError

    @property
    def available(self) -> int:
        """Numbers neither used nor promised; cached ones are among them."""
        with self.lock:
            return len(self._free) + self._cached - self._reserved

    def _counts(self) -> tuple[int, int, int, int]:
        """Return how many there are in all, used, free and cached."""
        with self.lock:
            return self.total, self._used(), len(self._free), self._cached

    def _used(self) -> int:
        return self.total - len(self._free) - self._cached

    def reserve(self, count: int) -> None:
        """Promise so many to a caller; OutOfPagesError if fewer are available."""
        with self.lock:
            if count > self.available:
                raise self._too_few(count)
            self._reserved += count

    def take_reserved(self, count: int) -> list[int]:
        """Turn promised numbers into taken ones; the tree gives up what is not free."""
        with self.lock:
            self._reserved -= count
            while len(self._free) < count and self._tree is not None:
                self.uncache([self._forget_one()])
            numbers = [self._free.pop() for _ in range(count)]
            for number in numbers:
                self._owners[number] = 1
            self.peak_used = max(self.peak_used, self._used())
        if numbers:
            logger.debug("%s %s taken, %d free", self.things, numbers, len(self._free))
        return numbers

    def share(self, numbers: Sequence[int]) -> None:
        """Count one more owner of each, which rows own already."""
        with self.lock:
            self.validity.invalidate()
            for number in numbers:
                self._owners[number] += 1

    def is_shared(self, number: int) -> bool:
        """Whether a number has more than one owner; then no row may write there."""
        return self._owners[number] > 1

    def give_back(self, numbers: Iterable[int] = (), reserved: int = 0) -> None:
        """Return taken numbers, and promised ones that were never taken."""
        with self.lock:
            self._disown(numbers)
            self._reserved -= reserved

    def _disown(self, numbers: Iterable[int]) -> int:
        """Remove one owner of each; return how many are free or cached now."""
        owners, in_tree, back = self._owners, self._in_tree, 0
        for number in numbers:
            left = owners[number] = owners[number] - 1
            if left == 0:
                self._free.append(number)
                back += 1
            elif left == 1 and number in in_tree:
                self._cached += 1
                back += 1
        return back

    # ---- a prefix tree's numbers. The owners of one and what they are counted in change with no call in between: in
    # any call the garbage collector may give one back.

    def share_cached(self, numbers: Sequence[int]) -> int:
        """Make a row one more owner of the first of the tree's ``numbers``; return how many."""
        # It stops at the first ones that are cached and promised to other rows.
        with self.lock:
            spare, shared = self.available, 0
            for number in numbers:
                if self._owners[number] == 1:
                    if spare <= 0:
                        break
                    spare -= 1
                    self._cached -= 1
                self._owners[number] += 1
                shared += 1
            self.peak_used = max(self.peak_used, self._used())
            return shared

    def uncache(self, numbers: Iterable[int]) -> None:
        """Remove the tree as an owner of its ``numbers``."""
        with self.lock:
            for number in numbers:
                self._owners[number] -= 1
                if self._owners[number] == 0:
                    self._cached -= 1
                    self._free.append(number)
                self._in_tree.remove(number)


class StateAccount(NamedTuple):
    """The pool at one moment; ``used + free + cached`` is always ``total``."""

    # Cached entries hold states after beginnings of earlier sequences, and are free for any row that needs them.

    total: int
    used: int
    free: int
    cached: int


class StatePool(OwnedNumbers):
    """A pool of entries, which are promised ahead of time, so that a row that was admitted never runs out."""

    things = "states"

    def __init__(self, entries: int, validity: StepValidity | None = None) -> None:
        super().__init__(list(range(entries - 1, -1, -1)), validity, lock())  # the pool of pages has the same lock

    def _forget_one(self) -> int:
        forgotten: int = self._tree.forget_state()
        return forgotten

    def _too_few(self, count: int) -> OutOfStatesError:
        return OutOfStatesError(
            f"{count} states of rows are needed and {self.available} of {self.total} are available; drop or close() "
            "caches that you keep (those of outputs), whose rows hold a state each, or wrap with a larger "
            "max_batch_size or kv_memory"
        )

    def lacks(self, rows: int) -> bool:
        """Whether entries for so many rows that begin to run are missing now and may be available later."""
        return self.available < rows * ENTRIES_OF_A_ROW <= self.total

    def account(self) -> StateAccount:
        return StateAccount(*self._counts())

    # ---- a prefix tree's entries

    def cache(self, entry: int, tree: object) -> None:
        """Let ``tree`` be an owner of an entry in the caller's place.

        Raises:
            ValueError: the entry has no owner or is in the tree already, or another tree has entries of this pool;
                nothing has changed.
        """
        with self.lock:
            self.check(entry, tree)
            self._tree = tree
            self._in_tree.add(entry)
            self._cached += self._owners[entry] == 1

    def check(self, entry: int, tree: object) -> None:
        """Raise as ``cache`` would."""
        if self._in_tree and self._tree is not tree:
            raise ValueError("insert: another prefix tree holds states of this pool; clear() that one first")
        if self._owners[entry] == 0 or entry in self._in_tree:
            raise ValueError(f"insert: the state {entry} belongs to no row, or is in the tree after other tokens")

    def is_cached(self, entry: int) -> bool:
        """Whether an entry of the tree's has no other owner."""
        return self._owners[entry] == 1


class PagePool(OwnedNumbers):
    """A pool of pages, which are promised ahead of time so that an admitted row never runs out."""

    # Steps lose their validity when rows share pages or forget tokens, but by no call of a tree: that owns full pages,
    # into which no row writes.

    things = "pages"

    def __init__(
        self,
        pages: int,
        page_size: int,
        validity: StepValidity | None = None,
        watch: Callable[[], RowWatch] | None = None,
        states: StatePool | None = None,
    ) -> None:
        super().__init__(list(range(pages - 1, NULL_PAGE, -1)), validity, lock() if states is None else states.lock)
        self.states = states  # what rows keep besides pages; None if they keep nothing
        self.page_size = page_size
        self.watch = RowWatch if watch is None else watch  # returns what hears of a new row

    def _forget_one(self) -> int:
        forgotten: int = self._tree.forget_oldest()
        return forgotten

    def _too_few(self, count: int) -> OutOfPagesError:
        return OutOfPagesError(f"{count} pages are needed and {self.available} of {self.total} are available")

    def lacks(self, pages: int, rows: int) -> bool:
        """Whether pages, or states of so many rows that begin to run, are missing now and may be available later."""
        with self.lock:
            states = self.states is not None and self.states.lacks(rows)
            return states or self.available < pages <= self.total

    def account(self) -> PageAccount:
        """Return how many pages are used, free and cached."""
        return PageAccount(*self._counts())

    def pages_for(self, tokens: int) -> int:
        """Return how many pages ``tokens`` of one row take."""
        return -(-tokens // self.page_size)

    def filled_by(self, tokens: int) -> int:
        return tokens // self.page_size

    def tokens_in(self, pages: int) -> int:
        """Return how many tokens of one row ``pages`` hold."""
        return pages * self.page_size

    def has_one_row(self, page: int) -> bool:
        """Whether a page becomes available when a row that owns it gives it back."""
        return self._owners[page] == (2 if page in self._in_tree else 1)

    def has_several_rows(self, page: int) -> bool:
        """Whether rows share a page that a tree has."""
        return self._owners[page] > 2

    def return_to_reserve(self, pages: Sequence[int]) -> int:
        """Turn taken pages back into promised ones, except those that other rows own; return how many."""
        with self.lock:
            self.validity.invalidate()
            back = self._disown(pages)
            self._reserved += back
            return back

    def cache(self, pages: Sequence[int], tree: object) -> None:
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
