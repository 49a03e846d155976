"""Rounds of one loop: steps with drafts and without, whose tokens come out one for each row at a time, as steps' do."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from compiled_llm.compilation.drafts import Drafter
from compiled_llm.execution.batch import Batch
from compiled_llm.execution.drafts import ngram
from compiled_llm.execution.drafts.part import Drafts, DraftSettings
from compiled_llm.execution.drafts.rule import Rule
from compiled_llm.execution.drafts.texts import Texts
from compiled_llm.execution.generate_loop import GenerateLoop
from compiled_llm.kvcache.errors import OutOfPagesError
from compiled_llm.kvcache.row import Row


class _Answer:
    """The tokens of a row that the host has read, and those among them that the caller has not been given yet."""

    def __init__(self, stored: NDArray[np.int64], left: int) -> None:
        self._text = np.concatenate([stored, np.zeros(left + 1, dtype=np.int64)])
        self._length = len(stored)
        self.left = left  # how many more it may get
        self.waiting: deque[int] = deque()

    @property
    def text(self) -> NDArray[np.int64]:
        return self._text[: self._length]

    def append(self, tokens: Sequence[int]) -> None:
        """Add tokens, as far as it may get more."""
        tokens = tokens[: self.left]
        self._text[self._length : self._length + len(tokens)] = tokens
        self._length += len(tokens)
        self.left -= len(tokens)
        self.waiting.extend(tokens)


class Rounds:
    """The rounds of rows whose prompts wait in a loop, or whose logits do."""

    # Rows get different numbers of tokens in a round. One that is ahead waits with them; it runs on meanwhile.

    def __init__(
        self,
        loop: GenerateLoop,
        settings: DraftSettings,
        texts: Sequence[NDArray[np.int64]],
        left: int,
        rule: Rule | None = None,
        drafter: Callable[[Texts], Drafter] = ngram.drafter_of,
        name: str = "ngram",
    ) -> None:
        """Let each row of the loop get ``left`` more tokens; the pages for them are promised.

        Args:
            texts: the tokens that each row's pages hold once its prompt is computed.

        Raises:
            ValueError: there is too little memory for the texts.
        """
        self._loop, self._runner = loop, loop.model_runner
        self._answers = answers = {row: _Answer(text, left) for row, text in zip(loop.rows, texts, strict=True)}
        # Not by ``self``: such a cycle would keep the loop and its pages until the garbage collector runs.
        self._drafts = Drafts(self._runner, settings, lambda row: answers[row].text, drafter, name, rule)
        self._drafts.texts.forget(loop.rows)
        self._running = list(loop.rows)
        self._prefilled = False
        self._batches: dict[int, Batch] = {}
        for row in loop.rows:
            self._promise_more(row)
        self._limits = {row: min(row.limit, self._runner.max_positions) for row in loop.rows}

    def _promise_more(self, row: Row) -> None:
        """Promise pages for drafts beyond a row's end, if there are any: else it ends with steps of one token."""
        # At its last token but one, a step of which the host knows nothing yet may run, and the next one is launched.
        try:
            row.reserve(min(row.limit + 2 * self._drafts.sizes[-1], self._runner.max_positions))
        except OutOfPagesError:
            return

    def leave(self, row: Row) -> None:
        """Let a row take no part in further rounds."""
        if row in self._running:
            self._running = [other for other in self._running if other is not row]
        self._answers[row].left = 0
        self._answers[row].waiting.clear()

    def next(self) -> dict[Row, int]:
        """Launch what is to be launched, and return the next token of each row that goes on; none if some wait."""
        waiting = self._waiting()
        if waiting is None:
            self._round()
            waiting = self._waiting()
        return {} if waiting is None else {row: own.popleft() for row, own in waiting.items()}

    def _waiting(self) -> dict[Row, deque[int]] | None:
        """Return the tokens of rows that have some, None if one that goes on has none."""
        answers = self._answers.items()
        if any(answer.left and not answer.waiting for _, answer in answers):
            return None
        return {row: answer.waiting for row, answer in answers if answer.waiting}

    def _round(self) -> None:
        """Launch a step, if there is one to launch, and read the oldest but one; at the end the oldest."""
        if not self._prefilled:
            self._loop.step()
            self._prefilled = True
            self._read_prefill()
            return
        rows = self._unfinished()
        if rows and (new := self._size(rows)):
            self._loop.launch(self._batch(rows, new))
            if self._loop.unread > 1:
                self._read()
        else:
            self._read()

    def _read_prefill(self) -> None:
        for row, token in self._loop.drain().items():
            self._answers[row].append([token])

    def _unfinished(self) -> list[Row]:
        """Return the rows that may need more tokens than launched steps surely give."""
        launched = self._loop.unread
        rows = [row for row in self._running if self._answers[row].left > launched]
        return self._running if len(rows) == len(self._running) else rows

    def _size(self, rows: Sequence[Row]) -> int:
        """Return how many tokens each row feeds in next; 0 if that has to be read first."""
        most = min([self._limits[row] - row.length_at_most for row in rows])
        new = self._drafts.rule.size(rows)
        return new if new <= most else int(most > 0)

    def _batch(self, rows: list[Row], new: int) -> Batch:
        known = self._batches.get(new)
        if known is None or known.decode is not rows:
            drafting = self._drafts.drafting(new) if new > 1 else None
            known = self._batches[new] = Batch(decode=rows, promise=self._loop.promise, drafting=drafting)
        return known

    def _read(self) -> None:
        for row, tokens in self._loop.read().by_row():
            self._answers[row].append(tokens)
