"""A decode step that is made once and then run again and again: the same rows, the same CUDA graph."""

# Most steps differ from the one before in nothing but their tokens. What such a step needs is found when it is made; to
# run it asks no other object. Whatever changes one of these things invalidates the step, and the next one is made anew.
# Shapes: B rows of a bucket, q new tokens of each, T = B * q, V vocabulary.

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import Tensor

from compiled_llm.compilation.graphs.outputs import StepOutputs
from compiled_llm.compilation.graphs.step_key import StepKey
from compiled_llm.execution.accepted import AcceptedTokens
from compiled_llm.execution.batch import Batch, Drafting, StepOutput, Tap, TokenSpan, last_tokens
from compiled_llm.execution.decode.deferred_sampling import DeferredSampling
from compiled_llm.execution.state.runner_state import RunnerState
from compiled_llm.execution.state.staging import Readbacks
from compiled_llm.execution.steps.launch import Launch
from compiled_llm.execution.threads.interrupts import deferred
from compiled_llm.kvcache.row import Row


class DecodeStep:
    """The next steps of rows that sit in the decode buffers.

    Attributes:
        output: of its last run, after each new token of its rows.
        alone: whether it can be launched briefly: its program alone may take long, and captures that go on.
    """

    def __init__(
        self,
        rows: list[Row],
        launch: Launch,
        room: int,
        feed: Callable[[Tensor], None],
        state: RunnerState,
        period: object,
        deferred_sampling: DeferredSampling,
        readbacks: Readbacks,
        taps: Sequence[Tap] = (),
        drafting: Drafting | None = None,
    ) -> None:
        """Note a step that has just run, of rows grown by the tokens that they have fed in, and what runs it again."""
        # Rows can grow by ``room`` tokens until one lacks a page number or a position, within ``period``.
        self.rows, self.repeats, self._page_size = rows, 0, state.config.page_size
        # The rows that enter a page when ``repeats``, modulo the page size, is the key; found in the first repeat.
        self._entering: dict[int, list[Row]] | None = None
        self._launch = launch
        self.alone = launch.alone
        self._room = float(room if launch.repeats else 0)
        self._feed, self._arena = feed, state.arena
        self._validity, self._period = state.validity, period
        self._deferred_sampling, self._readbacks = deferred_sampling, readbacks
        self._defers = bool(deferred_sampling.deferring) and deferred_sampling.defers(rows)
        self._taps, self._drafting = taps, drafting  # of the batch that it was made for
        self._spans: list[TokenSpan] = []  # for taps, of the first run that one watches
        self._read_at = 0  # its ``repeats``
        count, new = len(rows), launch.new_tokens
        self._new, self._asked, self._accepts = new, launch.key.wants, bool(launch.key.drafter)
        self._kept = slice(count * new) if count < launch.key.rows else None  # the others are padding's
        self.output = self._of_rows(launch.outputs)
        if self._accepts:
            self._accept(0)

    @property
    def key(self) -> StepKey:
        return self._launch.key

    @property
    def outputs(self) -> StepOutputs:
        """Those of its last run, of T tokens; a CUDA graph always writes the same tensors."""
        return self._launch.outputs

    def _of_rows(self, outputs: StepOutputs) -> StepOutput:
        logits, tokens, _ = outputs
        if self._kept is not None:
            logits, tokens = logits[self._kept], tokens[self._kept]
        return StepOutput(self.rows, logits, tokens)

    def end(self) -> None:
        """Let the next step be made anew, from the rows that sit in the decode buffers; it keeps no model alive."""
        self._room = -math.inf  # whatever is given back
        self._taps, self._drafting = (), None  # they may hold the cache whose step this is
        self._launch.release()

    def is_valid_for(self, batch: Batch) -> bool:
        """Whether the next step of a batch's rows is this one; asked in the executor."""
        return (
            self._period is self._validity.period
            and self._room >= self._new
            and self.rows == batch.decode
            and batch.drafting is self._drafting
            and (batch.taps is self._taps or self._asked == batch.wants)
            and not self._deferred_sampling.unsampled
        )

    def launch(self, batch: Batch, failed: Callable[[Sequence[Row]], None]) -> StepOutput:
        """Launch it, in the executor, for rows that feed in one token each, or guesses; captures may go on then.

        ``failed`` is called with its rows if it fails, or is interrupted: the decode buffers may have advanced.
        """
        launch, taps = self._launch, batch.taps
        try:
            if batch.tokens is not None:
                self._feed(batch.tokens)
            if self._arena.written:  # mostly nothing is due, and a call takes longer than a look
                self._arena.flush()
            if taps:
                self._deferred_sampling.begin(self.rows, taps)
            outputs = launch()
            if launch.entry is None:
                self.output = self._of_rows(outputs)
            with deferred():
                self._accept(self._new) if self._accepts else self._advance()
            if taps:
                self._show(taps)
        except BaseException:
            failed(self.rows)
            raise
        if self._defers or taps:
            self._deferred_sampling.add(self.output, taps, self._new if self._accepts else 1)
        return self.output

    def _advance(self) -> None:
        """Count one more token in each row; all have its page listed."""
        if self._entering is None:
            self._entering = {}
            for row in self.rows:
                self._entering.setdefault((self.repeats - row.exact_length) % self._page_size, []).append(row)
        for row in self._entering.get(self.repeats % self._page_size, ()):
            row.enter_page()
        for row in self.rows:
            row.position_at_most += 1
            row.length_at_most += 1
        self.repeats += 1
        self._room -= 1

    def _accept(self, new: int) -> None:
        """Have the tokens of the last run on their way to the host, and each row grow by as many as may count."""
        # The rows know that their lengths are bounds. All have the pages for them listed.
        rows, logits, tokens, *_ = self.output
        accepted = AcceptedTokens(rows, self._new, self._readbacks.start(tokens), self._give_back)
        self.output, size = StepOutput(rows, logits, tokens, accepted=accepted), self._page_size
        for row in rows:  # no call for each: there may be hundreds, and most enter a page
            row.position_at_most += new
            row.length_at_most += new
            while row.length_at_most > len(row.pages) * size:
                row.pages.append(row.ahead.pop(0))
        self.repeats += new
        self._room -= new

    def _give_back(self, tokens: int) -> None:
        """Note that each row has shrunk by so many tokens at least."""
        self._room += tokens

    def _show(self, taps: Sequence[Tap]) -> None:
        if not self._spans:
            self._spans, self._read_at = last_tokens(self.rows), self.repeats
        for tap in taps:
            tap.launched(self._spans, self._launch.outputs, self.repeats - self._read_at)
