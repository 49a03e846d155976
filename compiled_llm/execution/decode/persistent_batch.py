"""The rows of one loop in the decode buffers: a step of the same rows writes nothing."""

# Shapes: B rows, V vocabulary.

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

from torch import Tensor

from compiled_llm.compilation.graphs.step_key import StepKey
from compiled_llm.execution.batch import Batch, Drafting, StepOutput
from compiled_llm.execution.decode.decode_step import DecodeStep
from compiled_llm.execution.decode.deferred_sampling import DeferredSampling
from compiled_llm.execution.growth import sync_lengths
from compiled_llm.execution.reporting.events import UploadCause
from compiled_llm.execution.state.runner_state import RunnerState
from compiled_llm.execution.state.staging import Readbacks
from compiled_llm.execution.steps.decode_buffers import MovedRow
from compiled_llm.execution.steps.launch import Launch
from compiled_llm.execution.steps.steps import Steps
from compiled_llm.kvcache.row import Row

_Place: TypeAlias = tuple[int | None, int, int]
"""Slot, length, and position from the length on."""


class PersistentBatch:
    """The rows of one loop in the decode buffers, which each step advances by one token; loops take turns there.

    Attributes:
        exact: whether each step runs in the shape that follows from its rows alone, captured or not, so that the same
            rows give the same bits each time; if not, one whose CUDA graph is missing is padded to a larger one.
        bucket: how many rows the last decode step had, padding included; 0 if there was none.
        step: the last decode step, to be run again; None if its rows are no longer in the decode buffers.
    """

    def __init__(self, state: RunnerState, steps: Steps, readbacks: Readbacks, exact: bool = False) -> None:
        self.exact = exact
        self._steps, self._buffers = steps, steps.buffers
        self._state, self._slots, self._readbacks = state, state.slots, readbacks
        self._page_size, self._longest = state.config.page_size, state.max_positions
        self.bucket = 0
        self._wanted: StepKey | None = None
        self.step: DecodeStep | None = None
        self._placed: list[_Place] = []  # where each row of ``step`` was when the buffers were written
        self._advanced = 0  # by how many tokens since, until ``step`` ran first
        self._logits: Tensor | None = None  # of the last launch, if that was no decode step in the buffers
        self.deferred = DeferredSampling(state, steps)
        self._shared_pages = None if state.sharing is None else state.sharing.of_loop()
        self._runs: Sequence[Any] = ()  # of the rows that a step was last wanted for
        self._placed_runs: Sequence[Any] = ()

    @property
    def logits(self) -> Tensor | None:
        """``[B, V]`` of the last step, if it was one launch; those of a decode step are overwritten by the next."""
        return self.step.output.logits if self._logits is None and self.step is not None else self._logits

    # ---- a step is made

    def step_for(self, rows: Sequence[Row], wants: tuple[str, ...] = (), drafting: Drafting | None = None) -> StepKey:
        """Return the decode step of rows, not yet grown, after the last one, or if they draft the smallest."""
        if drafting is not None:
            return self._steps.step_of_several(len(rows), drafting.new_tokens)._replace(drafter=drafting.drafter)
        step = self._steps.decode_of(len(rows), self._wanted, self.exact)
        if self._shared_pages is not None:
            self._runs = self._shared_pages.runs(rows)
        return (StepKey.decode(step.rows, shares=True) if self._runs else step)._replace(wants=wants)

    def place(self, rows: Sequence[Row], launch: Launch, copied: bool) -> None:
        """Put rows, grown by what they feed in, in the decode buffers, unless they are there with their pages."""
        buffers, key, new = self._buffers, launch.key, launch.new_tokens
        if buffers.follows_pages:  # whose plan needs exact lengths
            sync_lengths(rows)
        listed = self._slots.list_pages(rows)
        if self._slots.states is not None:
            self._slots.list_states(rows)
        for tap in self._state.taps:
            tap.placed(rows, self._slots.numbers(rows), [new] * len(rows))
            tap.stored(rows)
        if self.step is not None:
            self._advanced += self.step.repeats
        if self.step is not None and self._has(self.step, rows, launch):
            entered = buffers.follows_pages and self._enters_page(rows, new)
            regrouped = self._runs != self._placed_runs
            if copied or listed or entered or regrouped:
                cause: UploadCause = "page_copied" if copied else "new_page"
                buffers.place(rows, key, cause, self._runs if regrouped else None, stay=True)
        else:
            moved: list[MovedRow] = []
            if self.step is not None:
                moved = self._moved(self.step, rows, new)
                self.invalidate()
            cause = "rows_changed" if buffers.claim(self) else "call_moved_in"
            if moved:
                staying = {row.to for row in moved}
                sync_lengths([row for at, row in enumerate(rows) if at not in staying])
            else:
                sync_lengths(rows)
                self._advanced = 0
            self._placed = [self._place(row, new) for row in rows]
            buffers.place(rows, key, cause, self._runs, moved=moved)
        self._placed_runs = self._runs

    def _has(self, step: DecodeStep, rows: Sequence[Row], launch: Launch) -> bool:
        """Whether the buffers, after ``step``, describe rows grown by what they are about to feed in."""
        # The buffers have gone back by the tokens that do not count, whether or not the host knows how many those are.
        if step.key != launch.key or step.rows != rows:
            return False
        return self._placed == [self._place(row, launch.new_tokens) for row in rows]

    def _moved(self, step: DecodeStep, rows: Sequence[Row], new_tokens: int) -> list[MovedRow]:
        """Return which rows stay in the buffers, after ``step``; none if the host knows all lengths anyway."""
        # Then to write them takes less.
        if not any(row.speculation.unread for row in rows):
            return []
        places = zip(step.rows, self._placed, strict=True)
        before = {row: (at, place) for at, (row, place) in enumerate(places)}
        more = new_tokens - step.key.new_tokens_per_row
        return [
            MovedRow(before[row][0], at, more)
            for at, row in enumerate(rows)
            if row in before and before[row][1] == self._place(row, new_tokens)
        ]

    def _place(self, row: Row, new_tokens: int) -> _Place:
        """Return a row's place as it was when the buffers were written; it has just grown by ``new_tokens``."""
        length = row.length_at_most + row.speculation.rejected
        from_length_on = row.position_at_most - row.length_at_most + new_tokens
        return row.slot, length - new_tokens - self._advanced, from_length_on

    def _enters_page(self, rows: Sequence[Row], new_tokens: int) -> bool:
        """Whether a row has just entered a page; padding, which has one page, may have with several new tokens."""
        # So may any row as far as plans are concerned that hold exact lengths.
        return (
            self._buffers.follows_tokens
            or new_tokens > 1
            or any((row.exact_length - 1) % self._page_size == 0 for row in rows)
        )

    def commit(self, rows: Sequence[Row], launch: Launch, period: object, batch: Batch) -> StepOutput:
        """Make the step of a batch that has just run, whose rows have grown, so that it can be run again."""
        # ``period`` is of ``StepValidity``, before the rows grew.
        rows = list(rows) if self.step is None else self.step.rows
        for row in rows:
            row.position_at_most += launch.new_tokens
            row.has_next = True
        if launch.new_tokens == 1:
            self._wanted, self.bucket = launch.wanted, launch.key.rows
        self._advanced += launch.new_tokens
        feed = functools.partial(self._buffers.feed, len(rows), launch.key)
        of_loop = self._state, period, self.deferred, self._readbacks, batch.taps, batch.drafting
        self.step = DecodeStep(rows, launch, self._room(rows), feed, *of_loop)
        self._logits = None
        return self.step.output

    def _room(self, rows: Sequence[Row]) -> int:
        """Return the tokens that rows can grow by before anything has to be written."""
        if self._buffers.follows_tokens:
            return 0
        if self._slots.states is not None and not all(row.states is None or row.states.alternates for row in rows):
            return 0
        if self._buffers.follows_pages:
            return min([min(row.room, self._longest - row.length_at_most) for row in rows])
        return min([min(row.listed * self._page_size, self._longest) - row.length_at_most for row in rows])

    # ---- rows come and go

    def record_sampled(self, step: StepOutput) -> None:
        """Note tokens that were sampled outside of the decode buffers."""
        for row in step.rows:
            row.has_next = True
        if self.step is not None:
            self.step.end()
        self._logits = step.logits

    def invalidate_rows(self, rows: Sequence[Row]) -> None:
        """``invalidate``, if one of these rows, which are about to change elsewhere, is in the decode buffers."""
        if self.step is not None and any(row in self.step.rows for row in rows):
            self.invalidate()

    def displace(self) -> None:
        """Note that other rows are in the decode buffers from now on."""
        if (logits := self.logits) is not None:
            self._logits = logits.clone()  # their replays overwrite them
        self.invalidate()

    def invalidate(self) -> None:
        """Write all decode buffers before the next decode step: rows have changed."""
        self._logits, step, self.step = self.logits, self.step, None
        if step is not None:
            step.end()  # a thread may be about to run it

    def discard_after_failure(self, rows: Sequence[Row]) -> None:
        """Forget the rows' next tokens, which a failed step may have overwritten, and leave the decode buffers."""
        self._slots.forget_next(rows)
        for row in rows:
            row.watch.lost()
        self.deferred.forget()
        self.invalidate()
        self._buffers.claim(None)

    def restart(self, rows: Sequence[Row] = ()) -> None:
        """Begin again with any bucket, and with rows that have no next tokens."""
        self._slots.forget_next(rows)
        self.deferred.forget()
        self.invalidate()
        self._logits, self.bucket, self._wanted = None, 0, None
