"""Tokens that are chosen after the launch that computed their logits: the host looks at earlier tokens first.

Of each launch, the logits of such rows are kept, which later launches would overwrite. ``DeferredChoice.run`` chooses
from them, for all these rows in one launch, and waits for nothing.

Shapes: D rows, V vocabulary, n rows that get a mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compiled_llm.compilation.sampling import choose
from compiled_llm.execution.batch import Observer, Step
from compiled_llm.execution.device_state import DeviceState
from compiled_llm.kvcache.row import Row

_NOTHING: Mapping[Row, Tensor] = {}


class Masks(NamedTuple):
    """Which tokens some rows may choose next.

    Attributes:
        rows: whose they are; those that have ended are left out.
        bits: ``[n, words]`` int32, a bit for each token, the lowest first: 0 bars it, and so does a missing word.
    """

    rows: Sequence[Row]
    bits: NDArray[np.int32]


class _Unchosen(NamedTuple):
    """What a launch has left of rows whose tokens are not chosen yet.

    Attributes:
        rows: those rows.
        logits: ``[D, V]``, nobody else's.
        observer: of the batch that they were launched in.
    """

    rows: Sequence[Row]
    logits: Tensor
    observer: Observer | None


class _Division(NamedTuple):
    """Which rows of a launch choose later.

    Attributes:
        all_rows: of the launch.
        deferred: those that do.
        plain: the others.
        places: where the deferred ones and the plain ones stand, on the device; None if all are of one kind.
    """

    all_rows: Sequence[Row]
    deferred: list[Row]
    plain: list[Row]
    places: list[Tensor] | None


class DeferredChoice:
    """What one loop has not chosen yet."""

    def __init__(self, state: DeviceState) -> None:
        """Begin with nothing."""
        self._state = state
        self._unchosen: list[_Unchosen] = []
        self._deferring = state.slots.deferring
        self._last = _Division((), [], [], None)  # the next launch mostly has the same rows

    def __bool__(self) -> bool:
        """Whether there are rows whose tokens are not chosen yet."""
        return bool(self._unchosen)

    @property
    def rows(self) -> list[Row]:
        """The rows whose tokens are not chosen yet, in the order of their launches."""
        return [row for part in self._unchosen for row in part.rows]

    def logits_of(self, row: Row) -> Tensor:
        """Return ``[V]``, a copy of what the row's next token is chosen from, in the model's dtype.

        Raises:
            ValueError: the row's next token does not wait to be chosen.
        """
        for part in self._unchosen:
            if row in part.rows:
                return part.logits[part.rows.index(row)].clone()
        raise ValueError("logits_of: the row has no token that waits to be chosen")

    def forget(self) -> None:
        """Leave it unchosen."""
        self._unchosen.clear()
        self._last = _Division((), [], [], None)

    # ---- keep

    def keep(self, step: Step, observer: Observer | None) -> Step:
        """Keep what rows of a launch choose from later, show the others to the observer, and return the step."""
        if not self._deferring:
            return _shown(step, observer)
        division = self._division(step.rows)
        if not division.deferred:
            return _shown(step, observer)
        assert step.logits is not None, "a step of one launch"
        if division.places is None:
            logits = step.logits.clone()
        else:
            deferred, plain = division.places
            logits = step.logits.index_select(0, deferred)
            if observer is not None:
                observer(Step(division.plain, step.logits.index_select(0, plain), step.tokens.index_select(0, plain)))
        for row in division.deferred:
            row.has_next = False
        self._unchosen.append(_Unchosen(division.deferred, logits, observer))
        return step

    def _division(self, rows: Sequence[Row]) -> _Division:
        if self._last.all_rows is not rows:
            kinds = [row.slot in self._deferring for row in rows]
            deferred, plain = ([row for row, kind in zip(rows, kinds, strict=True) if kind == own] for own in (1, 0))
            places = None
            if deferred and plain:
                places = self._state.staging.to_device([np.flatnonzero(kinds), np.flatnonzero(~np.array(kinds))])
            self._last = _Division(rows, deferred, plain, places)
        return self._last

    # ---- choose

    def run(self, masks: Masks | None = None, edited: Mapping[Row, Tensor] = _NOTHING) -> Step:
        """Choose what is not chosen yet, and wait for nothing.

        Args:
            masks: new ones, of rows that have come in with one; the others keep theirs.
            edited: ``[V]`` logits to choose from in place of what the model said, on its device, of any dtype.

        Returns:
            The rows, their logits as the model said them, and their tokens ``[D]``; ``NOT_A_TOKEN`` for those that have
            ended meanwhile, too.

        Raises:
            ValueError: a row that is given a mask has come in without one; nothing has changed.
        """
        rows = self.rows
        slots, positions = self._uploaded(rows, masks)
        parts, self._unchosen = self._unchosen, []
        logits = parts[0].logits if len(parts) == 1 else torch.cat([part.logits for part in parts])
        tokens = choose(_replaced(logits, rows, edited), slots, positions, self._state.slots.tables, deferred=True)
        for row in rows:
            row.has_next = row.slot is not None
        self._observe(parts, tokens)
        return Step(rows, logits, tokens)

    def _uploaded(self, rows: Sequence[Row], masks: Masks | None) -> tuple[Tensor, Tensor]:
        """Write what has to be written, all in one upload, and return the rows' slots and positions on the device."""
        state = self._state
        new = None if masks is None else state.slots.masks_of(*masks)
        positions = np.array([row.position for row in rows], dtype=np.int64)
        arrays = [state.slots.of(rows, len(rows)), positions, *(() if new is None else (new[0], new[1].reshape(-1)))]
        state.arena.flush()
        there = state.staging.to_device(arrays)
        if new is not None:
            state.slots.tables.allowed.index_copy_(0, there[2], there[3].view(new[1].shape))
        return there[0], there[1]

    @staticmethod
    def _observe(parts: Sequence[_Unchosen], tokens: Tensor) -> None:
        start = 0
        for rows, logits, observer in parts:
            _shown(Step(rows, logits, tokens[start : start + len(rows)]), observer)
            start += len(rows)


def _shown(step: Step, observer: Observer | None) -> Step:
    if observer is not None:
        observer(step)
    return step


def _replaced(logits: Tensor, rows: Sequence[Row], edited: Mapping[Row, Tensor]) -> Tensor:
    if not edited:
        return logits
    logits = logits.float() if logits.dtype != torch.float32 else logits.clone()
    for row, own in edited.items():
        logits[rows.index(row)] = own
    return logits


def prepare_deferred(state: DeviceState) -> None:
    """Launch what a deferred choice launches, for rows of padding."""
    tables, padding = state.slots.tables, state.slots.of([], 2)
    slots, positions = state.staging.to_device([padding, np.zeros_like(padding)])
    tables.allowed.index_copy_(0, slots[:1], tables.allowed[slots[:1]])
    logits = torch.zeros((2, tables.counts.shape[1]), dtype=state.pages[0].dtype, device=state.device)
    choose(logits.clone().index_select(0, torch.zeros_like(slots)), slots, positions, tables, deferred=True)
