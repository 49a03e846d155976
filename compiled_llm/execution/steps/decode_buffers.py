"""The buffers that decode steps read and advance, at fixed addresses: whose rows are there, and who writes them."""

# Shapes: B rows of a bucket, q new tokens of each, T = B * q, V vocabulary.

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from compiled_llm.compat.torch.profiler import is_profiling
from compiled_llm.compilation.graphs.step_key import StepKey
from compiled_llm.compilation.inputs import DecodeInputs
from compiled_llm.execution.plans import Planner
from compiled_llm.execution.reporting.events import UploadCause
from compiled_llm.execution.state.runner_state import RunnerState
from compiled_llm.execution.steps.graph_manager import GraphManager
from compiled_llm.execution.steps.planned_table import PlannedTable
from compiled_llm.kvcache.memory import mark_columns
from compiled_llm.kvcache.row import Row
from compiled_llm_ops.protocol import own_decode_ops

logger = logging.getLogger("compiled_llm.uploads")

_OF_ROWS = ("slots", "positions", "lengths", "starts")


class BatchOwner(Protocol):
    """The owner of the rows in the decode buffers."""

    def displace(self) -> None:
        """Other rows are in the buffers from now on."""


class MovedRow(NamedTuple):
    """A row that goes on from where the device has left it, of which the host may not know the length."""

    at: int  # its batch index
    to: int  # and from now on
    more: int  # by how many tokens more than in the last step it grows in the next, less if negative


class DecodeBuffers:
    """The buffers of one model for the largest batch, and their views for each bucket; one loop has them at a time."""

    # Steps that are planned are planned again for each token if they ``follows_tokens``, and whenever a row enters a
    # page if they ``follows_pages``.

    def __init__(self, state: RunnerState, graph_manager: GraphManager, planner: Planner) -> None:
        self._state, self._graph_manager = state, graph_manager
        self.ops = ops = state.config.backend_on(state.device.type).decode_ops  # None if steps are planned
        plain = state.device.type == "cpu" and ops is not None and ops.attend is own_decode_ops().attend
        self._plain = plain and not graph_manager.cuda_graphs.ours  # a replay repeats ops, and nothing between them
        arena, slots, taps = state.arena, state.slots, tuple(tap.inputs for tap in state.taps)
        columns = (arena["decode_slot"], arena["decode_position"], arena["decode_length"], arena["decode_start"])
        self._whole = DecodeInputs(*columns, slots.pages, ops, states=slots.states, taps=taps)
        self._views: dict[StepKey, DecodeInputs] = {}
        self._planned = PlannedTable(state, planner) if planner.decodes else None
        self._sharing = None if state.sharing is None else state.sharing.tables(state)
        self._owner: weakref.ref[BatchOwner] | None = None
        self.drafts: dict[str, Callable[[StepKey], Any]] = {}  # what steps draft with, by their ``StepKey.drafter``
        self.follows_tokens, self.follows_pages = planner.follows_tokens, planner.decodes

    def claim(self, owner: BatchOwner | None) -> bool:
        """Hand the decode buffers to ``owner``, and displace the previous one; return whether it had them already."""
        previous = self._owner() if self._owner is not None else None
        if previous is not None and previous is not owner:
            previous.displace()
        self._owner = None if owner is None else weakref.ref(owner)
        return previous is owner

    @property
    def nbytes(self) -> int:
        """Bytes outside the arena: the page table of planned steps, and the tables of shared pages."""
        return sum(part.nbytes for part in (self._planned, self._sharing) if part is not None)

    # ---- written

    def place(
        self,
        rows: Sequence[Row],
        step: StepKey,
        cause: UploadCause,
        runs: Sequence[Any] | None = (),
        stay: bool = False,
        moved: Sequence[MovedRow] = (),
    ) -> None:
        """Put rows, grown by the tokens that they are about to feed in, in the decode buffers; the rest is padding."""
        # ``runs`` are pages that they share, of a step that reads these once; None for those of the step before. If
        # they ``stay``, the rows are there, and advanced; what has changed is their pages. Some may have ``moved``.
        self._write(rows, step, len(rows) if stay else 0, moved)
        if moved:
            self._move(moved)
        if self._planned is not None:
            self._planned.lay_out(rows, step)
        elif self._sharing is not None and runs is not None and step.shares:
            self._sharing.lay_out(runs, rows, step)
        self._graph_manager.events.uploads[cause] += 1
        logger.debug("decode bucket %d: %d rows written: %s", step.rows, len(rows), cause)

    def _move(self, rows: Sequence[MovedRow]) -> None:
        """Move positions and lengths on the device, before anything is written there."""
        at, to, more = (np.array(column, dtype=np.int64) for column in zip(*rows, strict=True))
        old, new, added = self._state.staging.to_device([at, to, more])
        for column, grown in ((self._whole.positions, 0), (self._whole.lengths, added.int())):
            column.index_copy_(0, new, column.index_select(0, old) + grown)

    def _write(self, rows: Sequence[Row], step: StepKey, first: int, moved: Sequence[MovedRow] = ()) -> None:
        """Write rows and padding from the ``first`` batch index on: each step makes padding longer."""
        # Of rows that have moved it does not know positions and lengths.
        slots, padding, written = self._state.slots, [0] * (step.rows - len(rows)), np.arange(first, step.rows)
        if not len(written):
            return
        write, numbers, new = self._state.arena.write, slots.of(rows, step.rows), step.tokens // step.rows
        write("decode_slot", written, numbers[first:])
        known = np.setdiff1d(written, [row.to for row in moved]) if moved else written
        entering = [rows[at] for at in known.tolist() if at < len(rows)] if moved else rows[first:]
        write("decode_position", known, np.array([row.exact_position for row in entering] + padding, dtype=np.int64))
        lengths = [row.exact_length for row in entering] + [new] * len(padding)
        write("decode_length", known, np.array(lengths, dtype=np.int32))
        write("decode_start", written, (numbers[first:] * slots.pages_each).astype(np.int32))

    def feed(self, rows: int, step: StepKey, tokens: Tensor) -> None:
        """Let the first rows in the decode buffers feed in ``tokens`` ``[rows]`` for their own, on the device."""
        self._state.arena.flush()
        slots = self._view(step).slots[:rows]
        self._state.slots.tables.next_token.index_copy_(0, slots, tokens.long())

    # ---- read

    def of(self, step: StepKey) -> DecodeInputs:
        """Return what the program of a step reads, always the same tensors."""
        inputs = self._view(step)
        if self._plain and self._graph_manager.programs.interpreted and not is_profiling():  # a profile names ops
            inputs = inputs._replace(shares_places=True)
        if step.shares:
            assert self._sharing is not None, "steps share pages"
            return inputs._replace(shared=self._sharing.of(step))
        return inputs if self._planned is None else inputs._replace(planned=self._planned.of(step))

    def of_padding(self, step: StepKey) -> DecodeInputs:
        """Return what the program of a step reads, with rows of padding in place of those that are in the buffers."""
        slots = self._state.slots
        numbers, new = slots.of([], step.rows), np.full(step.rows, step.new_tokens_per_row, dtype=np.int32)
        first_pages = (numbers * slots.pages_each).astype(np.int32)
        own = self._state.staging.to_device([numbers, np.zeros_like(numbers), new, first_pages])
        mark_columns(own, step.rows)
        numbers_there, positions, lengths, starts = own
        inputs = self.of(step)._replace(slots=numbers_there, positions=positions, lengths=lengths, starts=starts)
        if step.shares:
            assert self._sharing is not None, "steps share pages"
            return inputs._replace(shared=self._sharing.of_padding(step))
        return inputs if self._planned is None else inputs._replace(planned=self._planned.of_padding(step))

    def _view(self, step: StepKey) -> DecodeInputs:
        """Return the views for a bucket; batch 1 is compiled with its size built in."""
        if step not in self._views:
            columns = {name: getattr(self._whole, name)[: step.rows] for name in _OF_ROWS}
            mark_columns([*columns.values()], step.rows)
            drafts = self.drafts[step.drafter](step) if step.drafter else None
            self._views[step] = self._whole._replace(**columns, wants=step.wants, drafts=drafts)
        return self._views[step]
