"""Decode steps over seats at fixed addresses, one bucket of rows each, and who sits there at the moment.

Shapes: B rows of a bucket, V vocabulary.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from compiled_llm.compilation.graphs.outputs import StepOutputs
from compiled_llm.compilation.inputs import DecodeInputs
from compiled_llm.compilation.programs import DECODE_MANY, DECODE_ONE
from compiled_llm.execution.decode_buffers import bucket_for
from compiled_llm.execution.device_state import DeviceState
from compiled_llm.execution.events import UploadCause
from compiled_llm.execution.planned_table import PlannedTable
from compiled_llm.execution.plans import Planner
from compiled_llm.execution.readiness import Readiness
from compiled_llm.kvcache.row import Row

logger = logging.getLogger("compiled_llm.uploads")

# Cudagraph trees run a new shape once as it is, record it on the second call and replay it from the third.
_CALLS_TO_RECORD = 3


class Seated(Protocol):
    """Whose rows are on the seats."""

    def unseat(self) -> None:
        """Know that others sit there from now on."""


class Decode:
    """The decode steps of one model.

    Attributes:
        ready: the buckets, among others, that can be run at once; always the same set.
    """

    def __init__(self, state: DeviceState, readiness: Readiness, planner: Planner) -> None:
        """Begin with empty seats; nothing is compiled yet."""
        self._state = state
        self._readiness = readiness
        self._planned = PlannedTable(state, planner) if planner.decodes else None
        self._recordings = readiness.recordings
        self.ready = readiness.ready
        self._owner: weakref.ref[Seated] | None = None

    def bucket_for(self, rows: int) -> int:
        """Return the smallest bucket that holds ``rows``."""
        return bucket_for(rows, self._state.config.max_batch_size)

    @property
    def ready_buckets(self) -> list[int]:
        """The buckets that are compiled, and on CUDA recorded."""
        return self._readiness.ready_buckets

    def make_ready(self, bucket: int, waiting: int = 0, unchanged: bool = False, number: str = "") -> None:
        """Compile decode for the bucket and record its graph, if that has not happened yet or no longer holds.

        Args:
            bucket: B.
            waiting: how many rows a call has that waits for it.
            unchanged: the model cannot have changed since the last prefill or the last call without this.
            number: shown behind what is done, which of how many it is.
        """
        readiness = self._readiness
        if unchanged and readiness.was_valid(bucket):
            return
        if not (unchanged and bucket in self.ready):
            readiness.check_model()
        if bucket in self.ready and readiness.is_valid(bucket):
            return
        self.claim(None)
        self._prepare(bucket, waiting, number)

    def _prepare(self, bucket: int, waiting: int, number: str) -> None:
        readiness, what = self._readiness, f"decode bucket {bucket}"
        waiting = 0 if self._recordings.lost(bucket) else waiting
        program = DECODE_ONE if bucket == 1 else DECODE_MANY
        shown = f"decode, {'1 row' if bucket == 1 else f'{bucket} rows'}{number}"
        with readiness.preparing(what, waiting, program, shown), self._recordings.accounted(what):
            for _ in range(_CALLS_TO_RECORD - 1 if readiness.programs.recorded else 0):
                self._launch_padding(bucket)
            outputs = self._launch_padding(bucket)
            readiness.programs.warn_if_nothing_matched(self._state.facts.model)
            if self._recordings.ours:
                readiness.record(bucket, lambda: self._launch(bucket), self._inputs(bucket), outputs)
        self.ready.add(bucket)

    def _launch_padding(self, bucket: int) -> StepOutputs:
        self.seat([], bucket, "bucket_prepared")
        self._state.arena.flush()
        return self._launch(bucket)

    def claim(self, owner: Seated | None) -> None:
        """Hand the seats to ``owner``; whoever had them is told."""
        previous = self._owner() if self._owner is not None else None
        if previous is not None and previous is not owner:
            previous.unseat()
        self._owner = None if owner is None else weakref.ref(owner)

    def owned_by(self, owner: Seated) -> bool:
        """Whether this owner's rows sit there."""
        return self._owner is not None and self._owner() is owner

    @property
    def table_bytes(self) -> int:
        """Size of what planned steps read beside the seats, in bytes."""
        return 0 if self._planned is None else self._planned.nbytes

    @property
    def follows_pages(self) -> bool:
        """Whether steps are planned, anew whenever a row enters a page."""
        return self._planned is not None

    def seat(self, rows: Sequence[Row], bucket: int, cause: UploadCause) -> None:
        """Put rows, already grown by the token that they are about to feed in, on the seats.

        Args:
            rows: the rows, whose slots have their page numbers; the rest of the bucket becomes padding.
            bucket: B.
            cause: why.
        """
        self._state.decode_buffers.seat(rows, bucket)
        self._written(rows, bucket, cause)

    def stay(self, rows: Sequence[Row], bucket: int, cause: UploadCause) -> None:
        """Let rows go on where they sit, though their pages have changed; otherwise as ``seat``."""
        self._state.decode_buffers.seat_padding(len(rows), bucket)
        self._written(rows, bucket, cause)

    def _written(self, rows: Sequence[Row], bucket: int, cause: UploadCause) -> None:
        if self._planned is not None:
            self._planned.lay_out(rows, bucket)
        self._readiness.events.uploads[cause] += 1
        logger.debug("decode bucket %d: %d rows written: %s", bucket, len(rows), cause)

    def feed(self, rows: int, bucket: int, tokens: Tensor) -> None:
        """Let the first rows on the seats feed in ``tokens`` ``[rows]``, on the device."""
        self._state.arena.flush()
        slots = self._state.decode_buffers.bucket(bucket).slots[:rows]
        self._state.slots.tables.next_token.index_copy_(0, slots, tokens.long())

    def run(self, bucket: int) -> StepOutputs:
        """Run one step of who sits there.

        Returns:
            ``[B, V]`` logits, and ``[B]`` int64, the next tokens; both overwritten by the next step.
        """
        self._readiness.events.used[bucket] += 1
        self._state.arena.flush()
        recording = self._recordings.get(bucket)
        return self._launch(bucket) if recording is None else recording.replay()

    def _launch(self, bucket: int) -> StepOutputs:
        state, readiness = self._state, self._readiness
        with readiness.paged():
            inputs = self._inputs(bucket)
            return readiness.programs.decode(state.facts.model, inputs, state.slots.tables, state.pages)

    def _inputs(self, bucket: int) -> DecodeInputs:
        inputs = self._state.decode_buffers.bucket(bucket)
        return inputs if self._planned is None else inputs._replace(planned=self._planned.bucket(bucket))
