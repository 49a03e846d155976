"""A decode step that is made once and then run again and again: the same rows, the same CUDA graph.

Most steps differ from the one before in nothing but their tokens. What such a step needs is found when it is made; to
run it asks no other object. Whatever changes one of these things invalidates the step, and the next one is made anew.

Shapes: B rows of a bucket, q new tokens of each, T = B * q, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from compiled_llm.compilation.graphs.outputs import StepOutputs
from compiled_llm.compilation.graphs.step_key import StepKey
from compiled_llm.execution.batch import Batch, StepOutput, Tap, TokenSpan, last_tokens
from compiled_llm.execution.decode.deferred_sampling import DeferredSampling
from compiled_llm.execution.decode.launch import Launch
from compiled_llm.execution.state.arena import Arena
from compiled_llm.execution.state.staging import Readback, Readbacks
from compiled_llm.execution.threads.executor import Executor
from compiled_llm.execution.threads.interrupts import deferred
from compiled_llm.kvcache.row import Row
from compiled_llm.kvcache.step_validity import StepValidity


class PlacedRows:
    """The rows in the decode buffers, each with its slot, length and position when it was placed.

    Attributes:
        rows: in the order of their batch indices.
        step: of B rows.
        advanced: how many tokens they have grown by since they were placed.
    """

    def __init__(self, rows: Sequence[Row], step: StepKey, page_size: int) -> None:
        """Note rows that have grown by the tokens that they are about to feed in, and whose step has run."""
        self.rows = list(rows)
        self.step = step
        self.advanced = 0
        self._page_size = page_size
        self._placed = [(row.slot, row.length + row.uncounted, row.position + row.uncounted) for row in rows]
        # The rows that enter a page when ``advanced``, modulo the page size, is the key; found when they first advance.
        self._entering: dict[int, list[Row]] | None = None

    def are(self, rows: Sequence[Row], step: StepKey) -> bool:
        """Whether the decode buffers describe these rows, grown by the tokens that they are about to feed in.

        The buffers have gone back by the tokens that do not count, whether or not the host knows how many those are.
        """
        if self.step != step or self.rows != rows:
            return False
        advanced, new = self.advanced, step.new_tokens_per_row
        before = [(row, row.uncounted - advanced) for row in rows]
        return self._placed == [(row.slot, row.length - new + by, row.position + by) for row, by in before]

    def advance(self) -> None:
        """Count one more token in each row; all have its page listed."""
        if self._entering is None:
            self._entering = self._find_entering()
        for row in self._entering.get(self.advanced % self._page_size, ()):
            row.enter_page()
        for row in self.rows:
            row.position += 1
            row.length += 1
        self.advanced += 1

    def has_advanced(self) -> None:
        """Count the tokens by which the rows have grown already."""
        self.advanced += self.step.new_tokens_per_row

    def _find_entering(self) -> dict[int, list[Row]]:
        entering: dict[int, list[Row]] = {}
        for row in self.rows:
            entering.setdefault((self.advanced - row.length) % self._page_size, []).append(row)
        return entering


class DecodeStep:
    """The next steps of rows that sit in the decode buffers.

    Attributes:
        output: of its last run, after the last new token of each row.
    """

    def __init__(
        self,
        placed: PlacedRows,
        launch: Launch,
        limit: int,
        feed: Callable[[Tensor], None],
        arena: Arena,
        validity: StepValidity,
        period: object,
        deferred_sampling: DeferredSampling,
        readbacks: Readbacks,
    ) -> None:
        """Note a step that has just run.

        Args:
            placed: its rows.
            launch: has run it, and runs it again.
            limit: how often it can run until a row lacks a page number or a position.
            feed: replaces the tokens that the rows feed in.
            arena: what is due in it is uploaded first.
            validity: tells whether something has changed.
            period: the one in which it was made.
            deferred_sampling: of the same loop.
            readbacks: copy tokens to the host.
        """
        self.placed = placed
        self._launch, self._limit = launch, limit if launch.repeats else 0
        self._feed, self._arena = feed, arena
        self._validity, self._period = validity, period
        self._deferred_sampling, self._readbacks = deferred_sampling, readbacks
        self._defers = deferred_sampling.defers(placed.rows)
        self._spans: list[TokenSpan] = []  # for taps, of the first run that one watches
        self._read_at = 0  # its ``advanced``
        rows, step = len(placed.rows), placed.step
        new = step.new_tokens_per_row
        self._last = slice(new - 1, rows * new, new) if new > 1 else slice(rows) if rows < step.rows else None
        self.output = self._last_of_rows(launch.outputs)

    @property
    def outputs(self) -> StepOutputs:
        """Those of its last run, of T tokens; a CUDA graph always writes the same tensors."""
        return self._launch.outputs

    def _last_of_rows(self, outputs: StepOutputs) -> StepOutput:
        logits, tokens, _ = outputs
        if self._last is not None:
            logits, tokens = logits[self._last], tokens[self._last]
        return StepOutput(self.placed.rows, logits, tokens)

    def end(self) -> None:
        """Let the next step be made anew, from the rows that sit in the decode buffers; it keeps no model alive."""
        self._limit = 0
        self._launch.release()

    def run_in(
        self,
        executor: Executor,
        batch: Batch,
        lose: Callable[[Sequence[Row]], None],
    ) -> list[tuple[Sequence[Row], Readback]] | None:
        """Run it once more and start copying its tokens; None if something has changed, and nothing was run.

        Args:
            executor: the model's.
            batch: of the step that is wanted, whose rows feed in one token each that was sampled for them.
            lose: called with its rows if the run fails, or is interrupted: the decode buffers may have advanced.

        Returns:
            The rows and their tokens on the way to the host; an empty list if all are sampled later.
        """
        call = executor.call_briefly if self._launch.replays else executor.call
        return call(self._run, batch, lose)

    def _run(self, batch: Batch, lose: Callable[[Sequence[Row]], None]) -> list[tuple[Sequence[Row], Readback]] | None:
        if not (self._launch.alone and self.is_valid_for(batch)):
            return None
        output = self.launch(batch, lose)
        late = self._deferred_sampling.unsampled and len(self._deferred_sampling.rows) == len(batch.decode)
        return [] if late else [(output.rows, self._readbacks.start(output.tokens))]

    def is_valid_for(self, batch: Batch) -> bool:
        """Whether the next step of a batch's rows is this one; asked in the executor."""
        return (
            self._period is self._validity.period
            and self._limit > 0
            and self.placed.rows == batch.decode
            and self.placed.step.wants == (batch.wants if batch.taps else ())
            and not self._deferred_sampling.unsampled
        )

    def launch(self, batch: Batch, lose: Callable[[Sequence[Row]], None]) -> StepOutput:
        """Launch it, in the executor; captures may go on afterwards.

        Args:
            batch: for which it is valid, whose rows feed in one token each.
            lose: as in ``run_in``.
        """
        launch = self._launch
        try:
            if batch.tokens is not None:
                self._feed(batch.tokens)
            if self._arena.written:  # mostly nothing is due, and a call takes longer than a look
                self._arena.flush()
            outputs = launch()
            if not launch.replays:
                self.output = self._last_of_rows(outputs)
            with deferred():
                self.placed.advance()
                self._limit -= 1
            if batch.taps:
                self._show(batch.taps)
        except BaseException:
            lose(self.placed.rows)
            raise
        if self._defers or batch.taps:
            self._deferred_sampling.keep(self.output, batch.taps)
        return self.output

    def _show(self, taps: Sequence[Tap]) -> None:
        if not self._spans:
            self._spans, self._read_at = last_tokens(self.placed.rows), self.placed.advanced
        for tap in taps:
            tap.launched(self._spans, self.outputs.emitted, self.placed.advanced - self._read_at)
