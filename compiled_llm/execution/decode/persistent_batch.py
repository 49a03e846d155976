"""The rows of one loop in the decode buffers: a step of the same rows writes nothing.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from compiled_llm.compilation.graphs.outputs import StepOutputs
from compiled_llm.execution.batch import StepOutput
from compiled_llm.execution.decode.decode import Decode
from compiled_llm.execution.decode.deferred_sampling import DeferredSampling
from compiled_llm.execution.reporting.events import UploadCause
from compiled_llm.execution.state.runner_state import RunnerState
from compiled_llm.execution.threads.interrupts import deferred
from compiled_llm.kvcache.row import Row


class PersistentBatch:
    """The rows of one loop in the decode buffers, which each replay advances by one token; loops take turns there.

    Attributes:
        exact: whether each step runs in the shape that follows from its rows alone, captured or not, so that the same
            rows give the same bits each time; if not, one whose CUDA graph is missing is padded to a larger one.
        bucket: how many rows the last decode step had, padding included; 0 if there was none.
        logits: ``[B, V]`` of the last step, if it was one launch; those of a decode step are overwritten by the next.
    """

    def __init__(self, state: RunnerState, decode: Decode, exact: bool = False) -> None:
        self.exact = exact
        self._decode = decode
        self._ready, self._pool, self._slots = decode.ready, state.pool, state.slots
        self._page_size, self._longest = state.config.page_size, state.max_positions
        self.bucket = self._wanted = 0
        self.logits: Tensor | None = None
        self.deferred = DeferredSampling(state)
        # The rows in the decode buffers, each with its slot, length and position when it was placed, and the bucket;
        # empty if another loop's are there. They have advanced by _advanced tokens since. They go on by themselves as
        # long as that is less than _limit, when a row runs out of listed pages or positions; unless after _changes of
        # the pool, a page has been shared, into which a row may write no more, or a row has forgotten tokens; or after
        # _taken, a row's slot is another's.
        self._rows: list[Row] = []
        self._placed: list[tuple[int | None, int, int]] = []
        self._size = self._advanced = self._limit = self._changes = self._taken = 0
        # The rows that enter a page when _advanced, modulo the page size, is the key; found at the first ``advance``.
        self._entering: dict[int, list[Row]] | None = None

    # ---- does it match?

    def can_advance(self, rows: Sequence[Row]) -> bool:
        """Return whether the next step of ``rows`` takes a replay and nothing else."""
        return (
            self._advanced < self._limit
            and self._changes == self._pool.changes
            and self._taken == self._slots.taken
            and self._rows == rows
            and self.bucket in self._ready
            and (self._wanted == self.bucket or self._wanted not in self._ready)
            and not self.deferred
        )

    def place(self, rows: Sequence[Row], bucket: int, copied: bool) -> bool:
        """Put rows, grown by the token that they are about to feed in, in the decode buffers of a bucket.

        Args:
            rows: in the order of the step.
            bucket: B.
            copied: whether a row left a page that it shares, to write into a copy.

        Returns:
            Whether they were there before.
        """
        listed = self._slots.list_pages(rows)
        if self._sit_on(rows, bucket):
            entered = self._decode.follows_pages and any((row.length - 1) % self._page_size == 0 for row in rows)
            if copied or listed or entered:
                self._decode.stay(rows, bucket, "page_copied" if copied else "new_page")
            return True
        cause: UploadCause = "rows_changed" if self._decode.owned_by(self) else "call_moved_in"
        self._decode.claim(self)
        self._decode.place(rows, bucket, cause)
        return False

    def _sit_on(self, rows: Sequence[Row], bucket: int) -> bool:
        """Whether the decode buffers already describe these rows."""
        grown = self._advanced + 1
        return (
            self._size == bucket
            and self._rows == rows
            and self._placed == [(row.slot, row.length - grown, row.position - self._advanced) for row in rows]
        )

    # ---- advance it

    def advance(self, tokens: Tensor | None = None) -> StepOutput:
        """Run a step of the same rows in the pages that are listed for them; ``tokens`` as in ``Batch``."""
        if self._wanted != self.bucket:
            self._decode.missed(self._wanted)
        try:
            if tokens is not None:
                self._decode.feed(len(self._rows), self.bucket, tokens)
            outputs = self._decode.run(self.bucket, self._wanted)
            with deferred():
                if self._entering is None:
                    self._entering = self._find_entering()
                for row in self._entering.get(self._advanced % self._page_size, ()):
                    row.enter_page()
                for row in self._rows:
                    row.position += 1
                    row.length += 1
                self._advanced += 1
        except BaseException:  # the decode buffers may have advanced
            self.lose(self._rows)
            raise
        return self._step(outputs)

    def _find_entering(self) -> dict[int, list[Row]]:
        entering: dict[int, list[Row]] = {}
        for row in self._rows:
            entering.setdefault((self._advanced - row.length) % self._page_size, []).append(row)
        return entering

    def has_run(
        self, rows: Sequence[Row], buckets: tuple[int, int], outputs: StepOutputs, stayed: bool, changes: int
    ) -> StepOutput:
        """Remember a decode step that did not just advance.

        Args:
            rows: grown by the token that they fed in.
            buckets: the wanted one, and the one that ran: B, padding included.
            outputs: of the step.
            stayed: whether the rows had the same batch indices before it.
            changes: of the pool, before the rows grew.
        """
        self._wanted, bucket = buckets
        if stayed:
            self._advanced += 1
        else:
            self._rows, self._size, self._advanced, self._entering = list(rows), bucket, 0, None
            self._placed = [(row.slot, row.length, row.position) for row in rows]
        for row in rows:
            row.has_next = True
        self.bucket, self._changes, self._taken = bucket, changes, self._slots.taken
        self._limit = self._advanced + min(min(self._room(row), self._longest - row.length) for row in rows)
        return self._step(outputs)

    def _room(self, row: Row) -> int:
        """Tokens that a row can grow by before anything has to be written."""
        return row.room if self._decode.follows_pages else row.listed * self._page_size - row.length

    def _step(self, outputs: StepOutputs) -> StepOutput:
        logits, tokens = outputs
        rows = len(self._rows)
        if rows < self.bucket:
            logits, tokens = logits[:rows], tokens[:rows]
        self.logits = logits
        return StepOutput(self._rows, logits, tokens)

    # ---- rows come and go

    def bucket_for(self, rows: int) -> int:
        """Return the smallest bucket for this many rows; if there were more, the smallest that is ready.

        So no step waits for a smaller one to be prepared because rows have ended. Exact steps go on in one of at most
        half the rows, ready or not: no step waits for its CUDA graph. One row stays in the program of several.
        """
        smallest = self._decode.bucket_for(rows)
        if smallest >= self._wanted:
            return smallest
        if self.exact and self._decode.captures:
            return max(smallest, 2) if 2 * smallest <= self._wanted else self._wanted
        return next((bucket for bucket in self._decode.ready_buckets if smallest <= bucket <= self._wanted), smallest)

    def chose(self, step: StepOutput) -> None:
        """Note tokens that were sampled outside of the decode buffers."""
        for row in step.rows:
            row.has_next = True
        self.logits = step.logits

    def leave(self, rows: Sequence[Row]) -> None:
        """Note that rows are about to change outside of the decode buffers."""
        if any(row in self._rows for row in rows):
            self.invalidate()

    def displace(self) -> None:
        """Note that other rows are in the decode buffers from now on."""
        if self.logits is not None:
            self.logits = self.logits.clone()  # their replays overwrite them
        self.invalidate()

    def invalidate(self) -> None:
        """Write all decode buffers before the next decode step: rows have changed."""
        self._rows, self._placed, self._limit = [], [], 0

    def lose(self, rows: Sequence[Row]) -> None:
        """Forget the rows' next tokens, which a failed step may have overwritten, and leave the decode buffers."""
        self._slots.forget_next(rows)
        self.deferred.forget()
        self.invalidate()
        self._decode.claim(None)

    def restart(self, rows: Sequence[Row] = ()) -> None:
        """Begin again with any bucket, and with rows that have no next tokens."""
        self._slots.forget_next(rows)
        self.deferred.forget()
        self.invalidate()
        self.logits, self.bucket, self._wanted = None, 0, 0
