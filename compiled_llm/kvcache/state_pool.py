"""The entries that a row has for the states that it keeps besides pages."""

# A state is never changed where it lies. A step reads the entry that holds a row's state, and writes another one, which
# becomes the row's; the earlier one stays until the next step. So rows that begin alike share an entry, as they share
# pages, and a row can forget the tokens of its last step. A prefix tree keeps the states after beginnings that may come
# again in the same way: it is one more owner of their entries.

from __future__ import annotations

from compiled_llm.kinds.rows import NO_ENTRY
from compiled_llm.kvcache.errors import OutOfStatesError
from compiled_llm.kvcache.pool import ENTRIES_OF_A_ROW, StatePool


def owned(entry: int) -> tuple[int, ...]:
    """Return the entry, if it is one."""
    return () if entry == NO_ENTRY else (entry,)


class RowStates:
    """The entries of one row."""

    # What a step of one token writes lies in the place ``n % 2`` of the row's two, n its tokens with the new one, and
    # it reads the other place. So a step that is run again finds both by the row's length, which it has on the device.

    def __init__(self, pool: StatePool) -> None:
        self._pool = pool
        self._reserved = 0
        self._entries = [NO_ENTRY, NO_ENTRY]
        self._lengths = [0, 0]  # after how many tokens each entry is the state; 0 if there is none
        self.period = object()  # an object of its own for as long as the entries are the same
        self.step = NO_ENTRY, NO_ENTRY  # what the last step reads and writes

    @property
    def places(self) -> tuple[int, int]:
        """The entries in both places; ``NO_ENTRY`` where there is none. ``period`` is another object if they change."""
        even, odd = self._entries
        return even, odd

    @property
    def alternates(self) -> bool:
        """Whether steps of one token may write both places in turn: the entries there are the row's alone."""
        return not any(entry == NO_ENTRY or self._pool.is_shared(entry) for entry in self._entries)

    def has_grown(self, length: int) -> None:
        """Follow a row that steps of one token, made once, have grown to ``length``."""
        if length > max(self._lengths):
            self._lengths[length % 2], self._lengths[1 - length % 2] = length, length - 1

    def of(self, length: int) -> int:
        """Return the entry of the state after ``length`` tokens; ``NO_ENTRY`` of none, ValueError if it is gone."""
        return NO_ENTRY if length == 0 else self._entries[self._place_of(length)]

    def _place_of(self, length: int) -> int:
        if length not in self._lengths:
            held = " and ".join(str(own) for own in sorted(filter(None, self._lengths))) or "none"
            raise ValueError(f"the state after {length} tokens is needed; the row has those after {held}")
        return self._lengths.index(length)

    def reserve(self) -> None:
        """Have promised what a running row needs; OutOfStatesError if that is not available."""
        needed = self._needed()
        if needed > self._reserved:
            self._pool.reserve(needed - self._reserved)
            self._reserved = needed

    def _needed(self) -> int:
        """Return how many entries the row may still take: none of those that others own is written."""
        own = [entry for entry in self._entries if entry != NO_ENTRY]
        return ENTRIES_OF_A_ROW - len(own) + sum(map(self._pool.is_shared, own))

    def grow(self, length: int, tokens: int) -> tuple[int, int]:
        """Have an entry for the state after ``tokens`` more than ``length``; return what a step reads and writes.

        What it reads stays as it was until the row grows again.

        Raises:
            ValueError: there is no state after ``length`` tokens any more; nothing has changed.
            OutOfStatesError: an entry that was not promised is not available; nothing has changed.
        """
        now = self.of(length)
        self.reserve()
        place = (length + tokens) % 2
        if now != NO_ENTRY and self._entries[place] == now:  # what is read makes way
            self._entries.reverse()
            self._lengths.reverse()
            self.period = object()
        if self._entries[place] == NO_ENTRY or self._pool.is_shared(self._entries[place]):
            self._drop(place)
            (self._entries[place],) = self._pool.take_reserved(1)
            self._reserved -= 1
        self._lengths[place] = length + tokens
        self.step = now, self._entries[place]
        return self.step

    def lend(self, length: int) -> int:
        """Own the entry of the state after ``length`` tokens once more, and return it, or raise OutOfStatesError."""
        entry = self.of(length)
        if entry != NO_ENTRY:
            self._pool.share([entry])
            try:
                self.reserve()
            except OutOfStatesError:
                self._pool.give_back([entry])
                raise
        return entry

    def hand_over(self, length: int) -> int:
        """Return the entry of the state after ``length`` tokens, now the caller's; ``NO_ENTRY`` if there is none."""
        # Its row has to be freed: it cannot go on.
        if length == 0 or length not in self._lengths:
            return NO_ENTRY
        place = self._lengths.index(length)
        entry, self._entries[place], self._lengths[place] = self._entries[place], NO_ENTRY, 0
        self.period = object()
        return entry

    def give_back(self, entry: int) -> None:
        """Give back what was lent, or what a caller owns of an entry besides the row."""
        self._pool.give_back(owned(entry))

    def go_back(self, entry: int, length: int) -> None:
        """Take over, in place of all others, an entry that was lent as the state after ``length`` tokens."""
        self.free()
        self._entries[length % 2], self._lengths[length % 2] = entry, length

    def begin_with(self, entry: int, length: int) -> None:
        """Own an entry after ``length`` tokens, too; OutOfStatesError if the row could not go on."""
        self._entries[length % 2], self._lengths[length % 2] = entry, length
        self._pool.share([entry])
        try:
            self.reserve()
        except OutOfStatesError:
            self._drop(length % 2)
            raise
        self.period = object()

    def fork(self, length: int) -> RowStates:
        """Return those of another row, with the same state after ``length`` tokens; OutOfStatesError as ``lend``."""
        forked, lent, reserved = RowStates(self._pool), NO_ENTRY, self._reserved
        try:
            lent = self.lend(length)
            if lent != NO_ENTRY:
                forked.begin_with(lent, length)
        except OutOfStatesError:
            self._pool.give_back(reserved=self._reserved - reserved)
            self._reserved = reserved
            raise
        finally:
            self._pool.give_back(owned(lent))
        return forked

    def shrink(self, length: int) -> None:
        """Forget the states after more than ``length`` tokens; ValueError if there is none after as many."""
        self.of(length)
        self._lengths = [own if own <= length else 0 for own in self._lengths]

    def release_unused(self, length: int) -> None:
        """Give back all but the state after ``length`` tokens."""
        kept = self.of(length)
        for place in (0, 1):
            if self._entries[place] != kept:
                self._drop(place)
        self._give_promises_back()

    def free(self) -> None:
        """Give all back; freeing again does nothing."""
        self._drop(0)
        self._drop(1)
        self._give_promises_back()

    def _give_promises_back(self) -> None:
        reserved, self._reserved = self._reserved, 0
        self._pool.give_back(reserved=reserved)

    def _drop(self, place: int) -> None:
        entry, self._entries[place], self._lengths[place] = self._entries[place], NO_ENTRY, 0
        self._pool.give_back(owned(entry))
        self.period = object()
