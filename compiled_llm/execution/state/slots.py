"""Slots hold the state of running rows on the device, whatever their batch indices."""

# A slot holds the row's next token, its page numbers, some of them ahead of its length, and its sampling settings. A
# row has one while a loop runs it; if there are more rows than slots, those wait outside that took theirs first.
# Shapes: X slots, N page numbers of a row.

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compiled_llm.compilation.sampling.sampling import GREEDY, Sampling, SamplingTables
from compiled_llm.execution.state.arena import Arena
from compiled_llm.execution.state.slot_settings import SlotSettings
from compiled_llm.execution.state.staging import Staging
from compiled_llm.execution.threads.interrupts import deferred
from compiled_llm.kinds.rows import NO_ENTRY
from compiled_llm.kvcache.row import Row
from compiled_llm.kvcache.step_validity import StepValidity

# Loops that interleave (a callback calls the model again, an engine and calls run) have slots at the same time.
SLOTS_FOR_A_ROW = 2

_AHEAD = 8
"""Pages whose numbers are written before rows enter them: a row that only goes on is written to once in so many."""


_STATES = "states_even", "states_odd"


class _Waiting(NamedTuple):
    """The contents of the slot that a row gave up."""

    token: Tensor | None
    sampling: Sampling
    carried: Sequence[Tensor] = ()


class Slots:
    """The slots of rows; in the model's executor only."""

    @staticmethod
    def columns(max_rows: int, pages_each: int, keeps_states: bool = False) -> dict[str, tuple[int, torch.dtype]]:
        """Return the columns of an arena for slots for this many rows, with states if rows have some."""
        count = SLOTS_FOR_A_ROW * max_rows + 1
        states = dict.fromkeys(_STATES if keeps_states else (), (count, torch.int32))
        return SlotSettings.columns(count) | {"pages": (count * pages_each, torch.int32)} | states

    def __init__(
        self,
        arena: Arena,
        staging: Staging,
        vocabulary: int,
        validity: StepValidity | None = None,
        carried: Sequence[Tensor] = (),
        keeps_states: bool = False,
    ) -> None:
        """All slots begin free, and greedy; a row takes its entry of ``carried`` along when it changes its slot."""
        self._arena = arena
        self._validity = StepValidity() if validity is None else validity
        self._settings = SlotSettings(arena, staging, vocabulary)
        self._carried = carried
        self.pages = arena["pages"]  # ``[X * N]`` int32, the page numbers of each slot
        # ``[X]`` int32 twice, the entries of each slot's row after an even and an odd number of tokens; None if
        # rows have no states
        self.states = (arena[_STATES[0]], arena[_STATES[1]]) if keeps_states else None
        # the slot of padding rows, which is greedy and has the null page alone
        self.padding = len(self.tables.next_token) - 1
        self.pages_each = len(self.pages) // (self.padding + 1)  # N
        self._free = list(range(self.padding - 1, -1, -1))
        if self.states is not None:
            for name in _STATES:
                arena.write(name, np.array([self.padding]), np.array([NO_ENTRY], dtype=np.int32))
        self._rows: dict[int, weakref.ref[Row]] = {}  # in the order in which they took them
        self._waiting: weakref.WeakKeyDictionary[Row, _Waiting] = weakref.WeakKeyDictionary()

    @property
    def deferring(self) -> set[int]:
        """The slots of rows whose sampling is deferred; always the same set."""
        return self._settings.deferring

    @property
    def tables(self) -> SamplingTables:
        return self._settings.tables

    def fit(self, vocabulary: int) -> None:
        self._settings.fit(vocabulary)

    @property
    def nbytes(self) -> int:
        """Bytes outside the arena."""
        return self._settings.nbytes

    def release(self) -> None:
        """Give back the memory outside the arena; nothing may be run afterwards."""
        self._settings.release()

    # ---- rows come and go

    @property
    def empty(self) -> bool:
        """Whether no row runs: none has a slot, or waits outside."""
        return len(self._free) == self.padding and not self._waiting

    def room_for(self, new: int, keeping: int) -> bool:
        """Return whether ``new`` rows of one loop may come in, and no loop lacks slots in a later step."""
        # Rows whose slots hold counts or masks keep them until they end (``keeping`` of the new ones); others take
        # turns in the rest.
        rows = self.padding - len(self._free) + len(self._waiting) + new
        if rows <= self.padding:  # as always while one loop runs, or two
            return True
        keeping += self._keeping
        return keeping + min(self.padding // SLOTS_FOR_A_ROW, rows - keeping) <= self.padding

    @property
    def _keeping(self) -> int:
        """The number of rows that keep their slots until they end."""
        rows = [(slot, reference()) for slot, reference in list(self._rows.items())]
        return sum(not self._settings.of(slot).forgets for slot, row in rows if row is not None and row.slot == slot)

    def admit(self, rows: Sequence[Row], settings: Sequence[Sampling | None]) -> None:
        """Give slots to rows that have none, with settings or greedy ones; RuntimeError if there are too few."""
        for row in rows:
            self._waiting.pop(row, None)
        if not self.room_for(len(rows), sum(not (sampling or GREEDY).forgets for sampling in settings)):
            self._refuse(len(rows))
        self._give(rows, [sampling or GREEDY for sampling in settings])

    def ensure(self, rows: Sequence[Row]) -> None:
        """Give all rows slots: those that waited outside go on as they were, others are greedy."""
        # RuntimeError, with nothing changed, if there are not enough.
        missing = [row for row in rows if row.slot is None]
        if not missing:
            return
        before = [self._waiting.get(row, _Waiting(None, GREEDY)) for row in missing]
        self._give(missing, [waiting.sampling for waiting in before], beside=rows)
        for row, waiting in zip(missing, before, strict=True):
            self._waiting.pop(row, None)
            if waiting.token is not None:
                self.tables.next_token[cast(int, row.slot)].copy_(waiting.token)
                row.has_next = True
            for column, entry in zip(self._carried, waiting.carried, strict=False):  # greedy rows have waited for none
                column[cast(int, row.slot)].copy_(entry)

    def feed(self, tokens: Mapping[Row, int]) -> None:
        """Replace the next tokens of rows."""
        rows = list(tokens)
        self.ensure(rows)
        at = self.of(rows, len(rows))
        self._arena.write("next_token", at, np.array([tokens[row] for row in rows], dtype=np.int64))

    def forget_next(self, rows: Sequence[Row]) -> None:
        for row in rows:
            row.has_next = False
            if (waiting := self._waiting.get(row)) is not None:
                self._waiting[row] = waiting._replace(token=None)

    def _give(self, rows: Sequence[Row], settings: Sequence[Sampling], beside: Sequence[Row] = ()) -> None:
        self._make_room(len(rows), {*rows, *beside})
        with deferred():  # a row that has a slot has its settings there
            self._take(rows, settings)

    def _take(self, rows: Sequence[Row], settings: Sequence[Sampling]) -> None:
        for row in rows:
            row.take_slot(self._free)
        taken = [cast(int, row.slot) for row in rows]
        for slot, row in zip(taken, rows, strict=True):
            self._rows.pop(slot, None)
            self._rows[slot] = weakref.ref(row)
        self._settings.enter(taken, settings)

    def _make_room(self, count: int, staying: set[Row]) -> None:
        """Move rows out, in the order in which they took their slots, until ``count`` slots are free."""
        for slot, reference in list(self._rows.items()):
            if count <= len(self._free):
                return
            row = reference()
            if row is not None and row.slot == slot and row not in staying and self._settings.of(slot).forgets:
                token = self.tables.next_token[slot].clone() if row.has_next else None
                carried = [column[slot].clone() for column in self._carried]
                self._waiting[row] = _Waiting(token, self._settings.of(slot), carried)
                row.leave_slot(waits=True)
                self._validity.invalidate()  # decode buffers may still name the slot
        if count > len(self._free):
            self._refuse(count)

    def _refuse(self, count: int) -> None:
        raise RuntimeError(
            f"{count} more rows cannot run: calls in progress take {self._keeping} of {self.padding} slots with "
            "rows whose penalties or grammars need them; wrap with a larger max_batch_size"
        )

    # ---- what slots hold

    def masks_of(
        self, rows: Sequence[Row], masks: NDArray[np.int32]
    ) -> tuple[NDArray[np.int64], NDArray[np.int32]] | None:
        """Return slots, and masks for ``tables.allowed`` there; None if no row has a slot."""
        # ``masks`` are ``[n, words]``, the rows' next ones; rows without a slot are left out. ValueError if one has
        # come in without a mask.
        slots = [row.slot for row in rows]
        if None in slots:
            here = [at for at, slot in enumerate(slots) if slot is not None]
            if not here:
                return None
            slots, masks = [slots[at] for at in here], masks[here]
        return np.array(slots, dtype=np.int64), self._settings.laid_out(cast(list[int], slots), masks)

    def remember(self, rows: Sequence[Row]) -> bool:
        """Return whether it matters to a row which tokens it has seen."""
        return any(row.slot is not None and not self._settings.of(row.slot).forgets for row in rows)

    def fed(self) -> list[Tensor]:
        """Return copies of what a step of rows that have sampled tokens before overwrites."""
        return [table.clone() for table in self._overwritten]

    @property
    def _overwritten(self) -> list[Tensor]:
        return [self.tables.next_token, *self._carried]

    def restore(self, slots: Iterable[int], fed: Sequence[Tensor] | None = None) -> None:
        """Forget the tokens that were sampled in these slots since rows took them."""
        # ``fed`` are copies of before, for rows that have sampled tokens before.
        self._settings.count_again(slots)
        for table, before in zip(self._overwritten, fed or (), strict=fed is not None):
            table.copy_(before)

    def list_pages(self, rows: Sequence[Row]) -> bool:
        """Write page numbers that the slots of rows lack, and some ahead; return whether any was lacking."""
        if not [row for row in rows if row.listed < len(row.pages)]:
            return False
        with deferred():  # pages that a row takes as listed are written
            where, pages = [], []
            for row in rows:
                if row.listed < len(row.pages) + _AHEAD // 2:  # the others later, all together
                    first, new = row.list_pages(min(_AHEAD, self.pages_each - len(row.pages)))
                    start = cast(int, row.slot) * self.pages_each + first
                    where.append(np.arange(start, start + len(new)))
                    pages += new
            self._arena.write("pages", np.concatenate(where), np.array(pages, dtype=np.int32))
        return True

    def list_states(self, rows: Sequence[Row]) -> None:
        """Write the entries of rows' states that are others than those in their slots."""
        both = ((row, states) for row in rows if (states := row.states) is not None)
        new = [(row, states) for row, states in both if row.states_listed is not states.period]
        if new:
            with deferred():
                slots = np.array(self.numbers([row for row, _ in new]), dtype=np.int64)
                for name, entries in zip(_STATES, zip(*(states.places for _, states in new), strict=True), strict=True):
                    self._arena.write(name, slots, np.array(entries, dtype=np.int32))
                for row, states in new:
                    row.states_listed = states.period

    def places(self, rows: Sequence[Row]) -> list[int]:
        """Return places for what taps have of rows: their slots, or of those without one, places after all slots."""
        return [self.padding + 1 + at if row.slot is None else row.slot for at, row in enumerate(rows)]

    def of(self, rows: Sequence[Row], padded: int) -> NDArray[np.int64]:
        """Return ``[padded]``, ``numbers`` and padding."""
        slots = np.full(padded, self.padding, dtype=np.int64)
        slots[: len(rows)] = self.numbers(rows)
        return slots

    def numbers(self, rows: Sequence[Row]) -> list[int]:
        """Return the slots of the rows; that of padding for rows without one."""
        return [self.padding if row.slot is None else row.slot for row in rows]
