"""A decode step that is made once and then run again and again: the same rows, the same CUDA graph."""

# Most steps differ from the one before in nothing but their tokens. What such a step needs is found when it is made; to
# run it asks no other object. Whatever changes one of these things invalidates the step, and the next one is made anew.
# Shapes: B rows of a bucket, q new tokens of each, T = B * q, V vocabulary.

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from compiled_llm.compilation.graphs.outputs import StepOutputs
from compiled_llm.compilation.graphs.step_key import StepKey
from compiled_llm.execution.batch import Batch, StepOutput, Tap, TokenSpan, last_tokens
from compiled_llm.execution.decode.deferred_sampling import DeferredSampling
from compiled_llm.execution.state.runner_state import RunnerState
from compiled_llm.execution.state.staging import Readback, Readbacks
from compiled_llm.execution.steps.launch import Launch
from compiled_llm.execution.threads.interrupts import deferred
from compiled_llm.kvcache.row import Row


class DecodeStep:
    """The next steps of rows that sit in the decode buffers."""

    # ``output`` is of its last run, after the last new token of each row.

    def __init__(
        self,
        rows: list[Row],
        launch: Launch,
        limit: int,
        feed: Callable[[Tensor], None],
        state: RunnerState,
        period: object,
        deferred_sampling: DeferredSampling,
        readbacks: Readbacks,
    ) -> None:
        """Note a step that has just run, of rows grown by the tokens that they have fed in, and what runs it again."""
        # It can run ``limit`` times until a row lacks a page number or a position, within ``period``.
        self.rows, self.repeats, self._page_size = rows, 0, state.config.page_size
        # The rows that enter a page when ``repeats``, modulo the page size, is the key; found in the first repeat.
        self._entering: dict[int, list[Row]] | None = None
        self._launch, self._limit = launch, limit if launch.repeats else 0
        self._feed, self._arena = feed, state.arena
        self._validity, self._period = state.validity, period
        self._deferred_sampling, self._readbacks = deferred_sampling, readbacks
        self._defers = bool(deferred_sampling.deferring) and deferred_sampling.defers(rows)
        self._spans: list[TokenSpan] = []  # for taps, of the first run that one watches
        self._read_at = 0  # its ``repeats``
        count, new = len(rows), launch.new_tokens
        self._last = slice(new - 1, count * new, new) if new > 1 else slice(count) if count < launch.key.rows else None
        self.output = self._last_of_rows(launch.outputs)

    @property
    def key(self) -> StepKey:
        return self._launch.key

    @property
    def outputs(self) -> StepOutputs:
        """Those of its last run, of T tokens; a CUDA graph always writes the same tensors."""
        return self._launch.outputs

    def _last_of_rows(self, outputs: StepOutputs) -> StepOutput:
        logits, tokens, _ = outputs
        if self._last is not None:
            logits, tokens = logits[self._last], tokens[self._last]
        return StepOutput(self.rows, logits, tokens)

    def end(self) -> None:
        """Let the next step be made anew, from the rows that sit in the decode buffers; it keeps no model alive."""
        self._limit = 0
        self._launch.release()

    def run(self, batch: Batch, failed: Callable[[Sequence[Row]], None]) -> list[tuple[Sequence[Row], Readback]] | None:
        """Run it again; return rows and their tokens, none if all are sampled later, or None if nothing was run."""
        # In the executor, briefly: its program alone may take long. ``failed`` is called with its rows if it fails,
        # or is interrupted: the decode buffers may have advanced.
        if not (self._launch.alone and self.is_valid_for(batch)):
            return None
        output = self.launch(batch, failed)
        late = self._deferred_sampling.unsampled and len(self._deferred_sampling.rows) == len(batch.decode)
        return [] if late else [(output.rows, self._readbacks.start(output.tokens))]

    def is_valid_for(self, batch: Batch) -> bool:
        """Whether the next step of a batch's rows is this one; asked in the executor."""
        return (
            self._period is self._validity.period
            and self._limit > 0
            and self.rows == batch.decode
            and self._launch.key.wants == (batch.wants if batch.taps else ())
            and not self._deferred_sampling.unsampled
        )

    def launch(self, batch: Batch, failed: Callable[[Sequence[Row]], None]) -> StepOutput:
        """Launch it, in the executor, for rows that feed in one token each; captures may go on afterwards."""
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
                self._advance()
            if batch.taps:
                self._show(batch.taps)
        except BaseException:
            failed(self.rows)
            raise
        if self._defers or batch.taps:
            self._deferred_sampling.add(self.output, batch.taps)
        return self.output

    def _advance(self) -> None:
        """Count one more token in each row; all have its page listed."""
        if self._entering is None:
            self._entering = {}
            for row in self.rows:
                self._entering.setdefault((self.repeats - row.length) % self._page_size, []).append(row)
        for row in self._entering.get(self.repeats % self._page_size, ()):
            row.enter_page()
        for row in self.rows:
            row.position += 1
            row.length += 1
        self.repeats += 1
        self._limit -= 1

    def _show(self, taps: Sequence[Tap]) -> None:
        if not self._spans:
            self._spans, self._read_at = last_tokens(self.rows), self.repeats
        for tap in taps:
            tap.launched(self._spans, self.outputs.emitted, self.repeats - self._read_at)
