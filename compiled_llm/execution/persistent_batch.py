"""What one runner remembers of the decode buffers, so that a step of the same rows in the same pages uploads nothing.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from compiled_llm.compilation.graphs.recordings import StepOutputs
from compiled_llm.execution.batch import Step
from compiled_llm.execution.decode import Decode
from compiled_llm.execution.device_state import DeviceState
from compiled_llm.execution.threads.interrupts import deferred
from compiled_llm.kvcache.row import Row


class PersistentBatch:
    """The rows of one runner in the decode buffers, which each replay advances by one token.

    Several persistent batches of one model take turns in the buffers.

    Attributes:
        bucket: how many rows the last decode step had, padding included; 0 if there was none.
        logits: ``[B, V]`` of the last step; those of a decode step are overwritten by the next one.
    """

    def __init__(self, state: DeviceState, decode: Decode) -> None:
        """Begin without rows."""
        self._decode = decode
        self._ready, self._pool, self._staging = decode.ready, state.pool, state.staging
        self._longest = state.max_positions
        self.bucket = 0
        self.logits: Tensor | None = None
        # The rows in the order in which the device holds their next tokens: in _tokens, or if that is None in the
        # decode buffers.
        self._order: list[Row] = []
        self._tokens: Tensor | None = None
        # Each row with its length and position when the buffers were uploaded, empty if others' rows have moved in;
        # the buffers have advanced by _advanced tokens since. They can advance as long as _advanced is less than
        # _limit, when a row enters a page or has no position left; unless by then, after _changes of the pool, pages
        # have been shared or given back.
        self._uploaded: list[tuple[Row, int, int]] = []
        self._advanced = self._limit = self._changes = 0

    # ---- does it match?

    def can_advance(self, rows: Sequence[Row]) -> bool:
        """Whether the next step of ``rows`` takes a replay and nothing else."""
        return (
            self._advanced < self._limit
            and self._changes == self._pool.changes
            and self._order == rows
            and self.bucket in self._ready
        )

    def matches(self, rows: Sequence[Row], unchanged: bool = False) -> bool:
        """Whether the decode buffers still match every row.

        Args:
            rows: in the order of the step.
            unchanged: nobody has touched a row but through its pages.
        """
        if unchanged and self._uploaded and self._changes == self._pool.changes and self._order == rows:
            return True
        advanced = self._advanced
        return self._uploaded == [(row, row.length - advanced, row.position - advanced) for row in rows]

    # ---- advance it

    def advance(self) -> Step:
        """Run a step of the same rows in the same pages."""
        try:
            outputs = self._decode.run(self.bucket)
            with deferred():
                self._advanced += 1
                for row in self._order:
                    row.length += 1
                    row.position += 1
        except BaseException:  # the buffers may have advanced
            self.lose()
            raise
        return self._step(outputs)

    def has_run(self, rows: Sequence[Row], bucket: int, outputs: StepOutputs, uploaded: bool, changes: int) -> Step:
        """Remember a decode step that others prepared.

        Args:
            rows: grown by the token that they fed in.
            bucket: B, padding included.
            outputs: of the step.
            uploaded: whether the rows were moved into the buffers for it.
            changes: of the pool, before the rows grew.
        """
        self._order, self._tokens, self.bucket = list(rows), None, bucket
        if uploaded:
            self._uploaded, self._advanced = [(row, row.length, row.position) for row in rows], 0
        else:
            self._advanced += 1
        room = min(min(row.room, self._longest - row.length) for row in rows)
        self._limit, self._changes = self._advanced + room, changes
        return self._step(outputs)

    def _step(self, outputs: StepOutputs) -> Step:
        logits, tokens = outputs
        rows = len(self._order)
        if rows < self.bucket:
            logits, tokens = logits[:rows], tokens[:rows]
        self.logits = logits
        return Step(self._order, logits, tokens)

    # ---- rows come and go

    def bucket_for(self, rows: int) -> int:
        """Return the smallest bucket for this many rows; if there were more, the smallest that is ready.

        Nobody waits for a smaller one to be prepared because rows have ended.
        """
        smallest = self._decode.bucket_for(rows)
        if smallest >= self.bucket:
            return smallest
        return next((bucket for bucket in self._decode.ready_buckets if smallest <= bucket <= self.bucket), smallest)

    def add(self, step: Step) -> None:
        """Keep the next tokens of newly prefilled rows beside those of the others; the rows have left the buffers."""
        tokens = step.tokens.clamp(min=0)
        self._tokens = tokens if self._tokens is None else torch.cat([self._tokens[: len(self._order)], tokens])
        self._order = [*self._order, *step.rows]
        self.logits = step.logits

    def next_tokens(self, rows: Sequence[Row]) -> Tensor:
        """Return ``[B]`` int64, the tokens that were chosen for ``rows``; they have left the buffers.

        Raises:
            RuntimeError: a row has none.
        """
        places = {row: place for place, row in enumerate(self._order)}
        if self._tokens is None or any(row not in places for row in rows):
            raise RuntimeError("step: the rows have no next tokens; give them as forced tokens")
        if self._order == rows:
            return self._tokens[: len(rows)]
        (order,) = self._staging.to_device([np.array([places[row] for row in rows], dtype=np.int64)])
        return self._tokens[order]

    def unseat(self) -> None:
        """Take the rows' tokens out of the decode buffers, before others move in."""
        if self._order and self._tokens is None:
            self._tokens = self._decode.tokens(self._decode.bucket_for(len(self._order))).clone()
        if self.logits is not None:
            self.logits = self.logits.clone()  # the next replay overwrites them
        self.invalidate()

    def invalidate(self) -> None:
        """Upload before the next decode step: rows have changed."""
        self._uploaded, self._limit = [], 0

    def lose(self) -> None:
        """Forget the rows, whose tokens a step that failed may have overwritten, and leave the buffers."""
        self.forget()
        self._decode.claim(None)

    def forget(self) -> None:
        """Forget the rows and their next tokens."""
        self._order, self._tokens = [], None
        self.invalidate()

    def restart(self) -> None:
        """Begin again without rows, and with any bucket."""
        self.forget()
        self.logits, self.bucket = None, 0
