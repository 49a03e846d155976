"""One sequence in the pool: its pages, its length, and its slot on the device."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from compiled_llm.kinds.rows import NO_ENTRY
from compiled_llm.kvcache.errors import OutOfPagesError
from compiled_llm.kvcache.pool import PagePool
from compiled_llm.kvcache.speculation import Speculation, SpeculativeStep
from compiled_llm.kvcache.state_pool import RowStates

_numbers = itertools.count(1)


class PageCopy(NamedTuple):
    """A last page of a row was shared: copy ``source`` to ``target`` before the row writes there."""

    source: int
    target: int


class Row:
    """One sequence: its pages, how many tokens they hold, and the position of the next token.

    Rows may share pages. Full pages are only read; the last one is copied before a row writes into it.

    Attributes:
        length_at_most: how many tokens the pages hold; an upper bound while steps are unread that have drafts, of which
            the device decides how many count. Who needs the number itself asks for ``exact_length``.
        position_at_most: rotary position of the next token, which equals the length unless the caller numbers tokens
            differently; likewise an upper bound, and ``exact_position`` the number itself.
        page_period: an object of its own for as long as the pages only grow, or go ahead and come back: of any two
            states in it, the pages of one are the first pages of the other.
        ahead: page numbers that it enters next; they are promised to it and hold nothing yet.
        slot: index of its state on the device, in the loop that runs it; None while no loop does.
        listed: how many of its page numbers, then of those ahead, are in its slot.
        speculation: what makes length and position upper bounds, for which the row has the pages.
        states_listed: the ``period`` of its states whose entries are in its slot; None if they are not there.
    """

    def __init__(self, pool: PagePool, tokens: int) -> None:
        """Promise pages for ``tokens``; OutOfPagesError if too few are available."""
        if tokens < 0:
            raise ValueError(f"a row cannot have room for {tokens} tokens")
        self._pool = pool
        self._reserved = pool.pages_for(tokens)
        self._states = None if pool.states is None else RowStates(pool.states)
        pool.reserve(self._reserved)
        if tokens:
            self._reserve_states()
        self.pages: list[int] = []
        self.page_period = object()  # tells rows apart as well, and keeps none alive
        self.length_at_most = 0
        self.position_at_most = 0
        self.ahead: list[int] = []
        self.slot: int | None = None
        self.listed = 0
        self.states_listed: object = None
        self.has_next = False
        self.speculation = Speculation()
        self.number, self.name = next(_numbers), ""
        self.watch = pool.watch()
        self._free_slots: list[int] = []
        self._promised_copy = 0  # 1 for a copy of the last page, in which the row has begun

    @property
    def states(self) -> RowStates | None:
        """What it keeps besides pages, as of its length; None if that is nothing."""
        if self._states is not None:
            self._states.has_grown(self.length_at_most)
        return self._states

    @property
    def entry(self) -> int:
        """The entry of its state; ``NO_ENTRY`` if it has no tokens, or no states."""
        return NO_ENTRY if self.states is None else self.states.of(self.length_at_most)

    @property
    def exact_length(self) -> int:
        """How many tokens the pages hold, waiting for steps that are unread if their drafts are among them."""
        if self.speculation.unread:
            self.speculation.sync()
        return self.length_at_most

    @property
    def exact_position(self) -> int:
        """Rotary position of the next token, waiting as ``exact_length``, be it read or set."""
        if self.speculation.unread:
            self.speculation.sync()
        return self.position_at_most

    @exact_position.setter
    def exact_position(self, position: int) -> None:
        self.sync()  # what an unread step rejects would be taken from it
        self.position_at_most = position

    def sync(self) -> None:
        """Have length and position exact, waiting for the steps that are unread."""
        if self.speculation.unread:
            self.speculation.sync()

    @property
    def length_at_least(self) -> int:
        """How many tokens it has for certain."""
        return self.length_at_most - self.speculation.most if self.speculation.unread else self.length_at_most

    @property
    def position_at_least(self) -> int:
        """The position, if of each step that is unread one token counts."""
        return self.position_at_most - self.speculation.most if self.speculation.unread else self.position_at_most

    @property
    def limit(self) -> int:
        """Tokens that the row's pages, taken and promised, can hold."""
        return self._pool.tokens_in(self.held)

    @property
    def held(self) -> int:
        """Pages that the row has, and those promised to it."""
        return len(self.pages) + len(self.ahead) + self._reserved

    @property
    def _promised(self) -> int:
        return len(self.ahead) + self._reserved

    @property
    def room(self) -> int:
        """Tokens that the row can grow by before it enters another page."""
        return len(self.pages) * self._pool.page_size - self.length_at_most

    def reserve(self, tokens: int) -> None:
        """Have room for ``tokens`` in all; OutOfPagesError if the missing pages or states are not available."""
        missing = self._pool.pages_for(tokens) - len(self.pages) - self._promised
        if missing > 0:
            self._pool.reserve(missing)
            self._reserved += missing
        self._reserve_states(max(0, missing))

    def give_promises_back(self, tokens: int) -> None:
        """Give back pages that were promised beyond those for ``tokens`` in all, but for those that its slot lists."""
        kept = max(0, self._pool.pages_for(tokens) - len(self.pages) - len(self.ahead))
        given = max(0, self._reserved - kept)
        self._reserved -= given
        self._pool.give_back((), given)

    def _reserve_states(self, pages: int | None = None) -> None:
        """Have what a running row needs, or give ``pages`` that were promised now, all if None, back and raise."""
        if self._states is not None:
            try:
                self._states.reserve()
            except OutOfPagesError:
                given = self._reserved if pages is None else pages
                self._pool.give_back((), given)
                self._reserved -= given
                raise

    def missing(self, tokens: int, kept: int | None = None) -> int:
        """Return how many pages ``tokens`` take beyond those taken and promised, if only ``kept`` present ones stay."""
        pool, kept = self._pool, self.length_at_most if kept is None else kept
        staying = pool.pages_for(kept)
        back = sum(pool.has_one_row(page) for page in self.pages[staying:])
        copied = int(tokens > kept and self._writes_into_shared(kept))
        return max(0, pool.pages_for(tokens) - staying - self._promised - back) + copied

    def _writes_into_shared(self, length: int) -> bool:
        full, begun = divmod(length, self._pool.page_size)
        return begun > 0 and self._pool.is_shared(self.pages[full])

    def grow(self, tokens: int) -> Sequence[PageCopy]:
        """Count ``tokens`` more as stored, in promised pages; return the copies to make first if a page is shared."""
        # OutOfPagesError, with nothing changed, if pages that were not promised are needed and not free.
        if self._states is not None and tokens:
            self._states.has_grown(self.length_at_most)
            self._states.grow(self.length_at_most, tokens)
        # Asked once: other threads may fork and free rows.
        copies = tokens > 0 and self._writes_into_shared(self.length_at_most)
        if self._promised_copy and not copies:
            self._give_copy_back()
        if tokens <= self.room and not copies:  # as most rows do in most steps
            self.length_at_most += tokens
            return ()
        if self.length_at_most + tokens > self.limit:  # a bound takes no page beyond promised ones
            self.sync()
        missing = max(0, self._pool.pages_for(self.length_at_most + tokens) - len(self.pages) - self._promised)
        missing += 1 - self._promised_copy if copies else 0
        if missing:
            self._pool.reserve(missing)
            self._reserved += missing
        self._reserved, self._promised_copy = self._reserved + self._promised_copy, 0
        made = self._unshare() if copies else ()
        self.length_at_most += tokens
        self.enter_pages(self.length_at_most)
        return made

    def begin_as(self, other: Row, tokens: int) -> int:
        """Share the first pages of a row that is about to store the same tokens; return how many tokens are shared."""
        # The rows begin with ``tokens`` equal ones; those that fill pages are shared, at least one is not. Both are
        # still empty, and ``other``, with room for the tokens, is computed before this row, or with it.
        full = 0 if self.states is not None else self._pool.filled_by(tokens - 1)
        other.enter_pages(self._pool.tokens_in(full))
        self._pool.share(other.pages[:full])
        self.pages, self.listed = other.pages[:full], 0
        self.length_at_most = self.position_at_most = self._pool.tokens_in(full)
        self.watch.changed(self.length_at_most)
        return self.length_at_most

    def enter_pages(self, tokens: int) -> None:
        """Take the pages for ``tokens`` in all, promised before, that the row is about to grow by."""
        self.pages += self._take(max(0, self._pool.pages_for(tokens) - len(self.pages)))

    def begin_from(self, pages: Sequence[int], state: int = NO_ENTRY, tokens: int | None = None) -> None:
        """Take over pages of ``PrefixTree.match``, which hold the first tokens of this row, still empty.

        The row is their owner already, and that of the ``state`` after these tokens, if rows have states.
        There are as many as fill the pages, or ``tokens``; a last page that is full in part is copied before the row
        writes there, and that copy is promised. The pages promised to it stay promised: call ``reserve`` afterwards for
        the tokens beyond.

        Raises:
            ValueError: the row has pages; what is given stays the caller's.
            OutOfPagesError: the row could not go on from its state, or in its last page; likewise.
        """
        if self.pages:
            raise ValueError(f"a row of {self.length_at_most} tokens cannot begin again; free it, or take an empty one")
        length = self._pool.tokens_in(len(pages)) if tokens is None else tokens
        copied = int(length % self._pool.page_size > 0)
        self._pool.reserve(copied)
        if self.states is not None and state != NO_ENTRY:
            try:
                self.states.begin_with(state, length)
            except OutOfPagesError:
                self._pool.give_back((), copied)
                raise
            self.states.give_back(state)
        self._promised_copy = copied
        self.pages, self.listed = list(pages), 0
        self.length_at_most = self.position_at_most = length
        self.watch.changed(length)

    def _give_copy_back(self) -> None:
        """Give up the promise of a page to copy to: a page that is not shared any more needs none."""
        promised, self._promised_copy = self._promised_copy, 0
        self._pool.give_back((), promised)

    def _unshare(self) -> Sequence[PageCopy]:
        (target,) = self._take(1)
        source, self.pages[-1] = self.pages[-1], target
        self.page_period = object()
        self.listed = min(self.listed, len(self.pages) - 1)
        self._pool.give_back([source])
        return [PageCopy(source, target)]

    def _take(self, count: int) -> list[int]:
        taken, self.ahead = self.ahead[:count], self.ahead[count:]
        missing = count - len(taken)
        self._reserved -= missing
        return taken + self._pool.take_reserved(missing)

    def enter_page(self) -> None:
        """Move the first page ahead to the row's own pages: a step has grown it by a token that lies there."""
        self.pages.append(self.ahead.pop(0))

    def list_pages(self, ahead: int) -> tuple[int, list[int]]:
        """List ``ahead`` pages to enter next, as far as promised; return how many were listed, and the new ones."""
        more = min(ahead - len(self.ahead), self._reserved)
        if more > 0:
            self._reserved -= more
            self.ahead += self._pool.take_reserved(more)
        first, pages = self.listed, [*self.pages, *self.ahead]
        self.listed = len(pages)
        return first, pages[first:]

    def fork(self) -> Row:
        """Return another row with the same tokens in the same pages, without promised ones."""
        self.sync()
        row = Row(self._pool, 0)
        if self.states is not None:
            row._states = self.states.fork(self.length_at_most)
        self._pool.share(self.pages)
        row.pages = list(self.pages)
        row.length_at_most, row.position_at_most = self.length_at_most, self.position_at_most
        row.watch = self.watch.shared()
        return row

    def mark(self) -> tuple[int, int]:
        """Return the state to which ``restore`` goes back."""
        return self.length_at_most + self.speculation.rejected, self._promised + len(self.pages)

    def restore(self, mark: tuple[int, int]) -> None:
        """Undo all growth since ``mark``, and the promises made for it; a page that was copied stays copied."""
        length, pages = mark
        self._shrink(self.length_at_most + self.speculation.rejected - length)
        self.watch.lost()  # a step may have failed in its middle
        extra = max(0, self._promised + len(self.pages) - pages)  # fewer if others share some of the pages
        self._pool.give_back((), reserved=extra)
        self._reserved -= extra

    def shrink(self, tokens: int) -> None:
        """Forget the last ``tokens``; pages left empty that no other row owns become promised ones again."""
        if not 0 <= tokens <= self.exact_length:
            raise ValueError(f"a row of {self.length_at_most} tokens cannot forget {tokens}")
        self._shrink(tokens)
        if tokens:
            self.watch.changed(self.length_at_most)

    def _shrink(self, tokens: int) -> None:
        if tokens and self.states is not None:
            self.states.shrink(self.length_at_most - tokens)
        self._shrink_pages(tokens)

    def _shrink_pages(self, tokens: int) -> None:
        self.length_at_most -= tokens
        keep = self._pool.pages_for(self.length_at_most)
        if keep < len(self.pages):
            self.listed = min(self.listed, keep)
            self.page_period = object()
        self._reserved += self._pool.return_to_reserve(self.pages[keep:])
        del self.pages[keep:]

    def lend_state(self) -> int:
        """Return its state's entry, which stays as it is until it is back; OutOfStatesError if it could not go on."""
        return NO_ENTRY if self.states is None else self.states.lend(self.exact_length)

    def return_state(self, entry: int) -> None:
        """Give back what ``lend_state`` returned."""
        if self.states is not None:
            self.states.give_back(entry)

    def go_back(self, length: int, entry: int) -> None:
        """Forget all tokens after the first ``length``, when ``lend_state`` returned ``entry``."""
        if self.states is not None:
            self.states.go_back(entry, length)
        self._shrink_pages(self.exact_length - length)
        self.watch.changed(length)

    def rewind(self, length: int) -> None:
        """Forget all tokens after the first ``length``."""
        extra = self.exact_length - length
        self.shrink(extra)
        self.position_at_most -= extra

    def release_unused(self) -> None:
        """Give back the pages that were promised and not entered, and the slot."""
        self.sync()
        self.leave_slot()
        if self.states is not None:
            self.states.release_unused(self.length_at_most)
        self._give_copy_back()
        ahead, reserved = self.ahead, self._reserved
        self.ahead, self._reserved = [], 0
        if ahead:  # a step may have entered them and gone back, and others come there next
            self.page_period = object()
        self._pool.give_back(ahead, reserved)

    def identify(self, ids: NDArray[np.int64]) -> None:
        """Say which tokens ``[T]`` the pages hold that it begins with."""
        self.watch.begins(ids[: self.length_at_most])

    def take_slot(self, free: list[int]) -> None:
        """Take one of the free slots; it goes back to ``free`` once the row leaves it."""
        self._free_slots = free
        self.slot = free.pop()

    def leave_slot(self, waits: bool = False) -> None:
        """Give the slot back, if there is one; a row that ``waits`` for another takes what is in there along."""
        if self.slot is not None:
            self._free_slots.append(self.slot)
        self.slot, self.listed, self.states_listed, self.has_next = None, 0, None, False
        if not waits:
            self.watch.lost()

    def free(self) -> None:
        """Give all pages back; the row holds nothing afterwards, and freeing it again does nothing."""
        self.leave_slot()
        self.speculation = Speculation()
        if self.states is not None:
            self.states.free()
        self._give_copy_back()
        pages, reserved = self.pages + self.ahead, self._reserved
        self.page_period = object()
        self.pages, self.ahead, self._reserved, self.length_at_most, self.position_at_most = [], [], 0, 0, 0
        self.watch.changed(0)
        self._pool.give_back(pages, reserved)


def reject(step: SpeculativeStep, rows: Sequence[Row], counts: Sequence[int]) -> None:
    """Let rows that a step has grown forget all but so many of its tokens each; those freed meanwhile have none."""
    # No call for each row: there may be hundreds.
    new = step.new_tokens
    for row, count in zip(rows, counts, strict=True):
        speculation = row.speculation
        if step not in speculation.unread:
            continue
        unread = speculation.unread
        speculation.unread = unread[1:] if unread[0] is step else tuple([own for own in unread if own is not step])
        if count < new:
            speculation.rejected += new - count
            row.length_at_most -= new - count
            row.position_at_most -= new - count
            size, pages = row._pool.page_size, row.pages
            # Those that were entered for tokens that do not count are ahead again.
            if row.length_at_most <= (len(pages) - 1) * size:
                keep = -(-row.length_at_most // size)
                row.ahead = pages[keep:] + row.ahead
                del pages[keep:]
