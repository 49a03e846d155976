"""Decode steps over buffers at fixed addresses, one bucket of rows each, and who is in the buffers at the moment.

Shapes: B rows of a bucket, V vocabulary.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

from compiled_llm.compilation.graphs.recordings import StepOutputs
from compiled_llm.compilation.inputs import DecodeInputs
from compiled_llm.compilation.programs import DECODE_MANY, DECODE_ONE
from compiled_llm.execution.decode_buffers import bucket_for
from compiled_llm.execution.device_state import DeviceState
from compiled_llm.execution.events import UploadCause
from compiled_llm.execution.plans import Planner
from compiled_llm.execution.readiness import Readiness
from compiled_llm.kvcache.row import Row
from compiled_llm.kvcache.table import build_table

logger = logging.getLogger("compiled_llm.uploads")

# Cudagraph trees run a new shape once as it is, record it on the second call and replay it from the third.
_CALLS_TO_RECORD = 3


class Seated(Protocol):
    """Whose rows are in the decode buffers."""

    def unseat(self) -> None:
        """Take the rows' tokens out of the buffers, before another's move in."""


class Decode:
    """The decode steps of one model.

    Attributes:
        ready: the buckets, among others, that can be run at once; always the same set.
    """

    def __init__(self, state: DeviceState, readiness: Readiness, planner: Planner) -> None:
        """Begin with empty buffers; nothing is compiled yet."""
        self._state = state
        self._planner = planner
        self._readiness = readiness
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
            for _ in range(_CALLS_TO_RECORD if readiness.programs.recorded else 1):
                self.upload([], bucket, None, "bucket_prepared")
                self._launch(bucket)
            readiness.programs.warn_if_nothing_matched(self._state.facts.model)
            if self._recordings.ours:
                readiness.record(bucket, lambda: self._launch(bucket), self._inputs(bucket))
        self.ready.add(bucket)

    def claim(self, owner: Seated | None) -> None:
        """Hand the buffers to ``owner``; whoever had them takes its tokens out first."""
        previous = self._owner() if self._owner is not None else None
        if previous is not None and previous is not owner:
            previous.unseat()
        self._owner = None if owner is None else weakref.ref(owner)

    def owned_by(self, owner: Seated) -> bool:
        """Whether the buffers hold this owner's rows."""
        return self._owner is not None and self._owner() is owner

    def tokens(self, bucket: int) -> Tensor:
        """Return ``[B]`` int64, what the rows in the buffers feed in next."""
        return self._state.decode_buffers.bucket(bucket).tokens

    def upload(self, rows: Sequence[Row], bucket: int, tokens: Tensor | None, cause: UploadCause) -> None:
        """Put rows, already grown by the token they are about to feed in, into the buffers.

        Args:
            rows: the rows; the rest of the bucket becomes null rows.
            bucket: B.
            tokens: ``[len(rows)]`` int64 on the device, what the rows feed in; None leaves it as it is.
            cause: why.
        """
        state, inputs = self._state, self._state.decode_buffers.bucket(bucket)
        table = build_table(rows, [1] * len(rows), state.config.page_size, bucket)
        positions = np.zeros(bucket, dtype=np.int64)
        positions[: len(rows)] = [row.position for row in rows]
        state.staging.upload(
            [
                (positions, inputs.positions),
                (table.last_page_len, inputs.last_page_len),
                (table.indptr, inputs.indptr),
                (table.indices, inputs.indices),
                (state.sampling.of(rows, bucket), inputs.slots),
            ]
        )
        self._planner.plan_decode(table, bucket)
        if tokens is not None:
            inputs.tokens[: len(rows)].copy_(tokens)
        self._readiness.events.uploads[cause] += 1
        logger.debug("decode bucket %d: a table of %d pages uploaded: %s", bucket, len(table.indices), cause)

    def run(self, bucket: int) -> StepOutputs:
        """Run one step over what lies in the buffers.

        Returns:
            ``[B, V]`` logits, and ``[B]`` int64, the next tokens; both overwritten by the next step.
        """
        recording = self._recordings.get(bucket)
        return self._launch(bucket) if recording is None else recording.replay()

    def _launch(self, bucket: int) -> StepOutputs:
        state, readiness = self._state, self._readiness
        with readiness.paged():
            inputs = self._inputs(bucket)
            return readiness.programs.decode(state.facts.model, inputs, state.sampling.tables, state.pages)

    def _inputs(self, bucket: int) -> DecodeInputs:
        return self._state.decode_buffers.bucket(bucket)._replace(plans=self._planner.for_decode(bucket))
