"""``Client.submit`` returns this: the answers to a prompt, on their way from another process."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from compiled_llm.client.answer import Received, RemoteAnswer, entries_of
from compiled_llm.protocol.messages import EmittedPiece, Entry, Summary, Update
from compiled_llm.requests.outputs import Figures, Logprob, RequestOutput
from compiled_llm.requests.pending import PendingAnswers

if TYPE_CHECKING:  # what makes text imports torch
    from compiled_llm.requests.text.answer_text import TextFormat

Cancelling = Callable[[int | None], None]  # ends an answer by its index, or all


class RemoteHandle(PendingAnswers[RemoteAnswer]):
    """A prompt that was sent to an engine process: iterate over its tokens or its ``text``, wait for its ``result``.

    Any thread may use it, as what ``Engine.submit`` returns, and any event loop by ``async for`` and ``await``.

    Attributes:
        refused: why the engine process has ended the whole request, or never began it.
        figures: what was measured, once the request has ended.
        prompt_logprobs: of the prompt's tokens, as far as they have come; None before that, or if they are not wanted.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        count: int,
        ends: frozenset[int],
        form: TextFormat | None,
        cancel: Cancelling,
        check: Callable[[], None] = lambda: None,
        scored_from: int = 1,
    ) -> None:
        """Wait for ``count`` answers; ``check`` raises in a thread that must not wait, as nothing comes meanwhile."""
        super().__init__([RemoteAnswer(index, Received(ends), form) for index in range(count)], check)
        self.prompt = prompt
        self.refused: Exception | None = None
        self._cancel = cancel
        self._unscored = len(prompt[:scored_from])
        self.figures: Figures | None = None
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._submitted = time.monotonic()

    @property
    def done(self) -> bool:
        """Whether all answers have ended."""
        return self.figures is not None

    @property
    def cached_tokens(self) -> int:
        """How many of the prompt's tokens the prefix cache had; 0 until the request has ended."""
        return 0 if self.figures is None else self.figures["cached_tokens"]

    @property
    def is_scored(self) -> bool:
        """Whether all log-probabilities of the prompt have come that will."""
        return self.done or len(self.prompt_logprobs or ()) == len(self.prompt)

    def cancel(self, index: int | None = None) -> None:
        """End what has not ended, or the answer of that index alone; tokens so far stay."""
        if not self.done:
            self._cancel(index)

    def output(self) -> RequestOutput:
        """Return what it came to, errors included, once it is ``done``."""
        assert self.figures is not None, "the request has not ended"
        with self._reading:
            completions = [answer.completion() for answer in self.answers]
        return RequestOutput(
            prompt_token_ids=list(self.prompt),
            outputs=completions,
            prompt_logprobs=self.prompt_logprobs,
            **self.figures,
        )

    # ---- in the thread that reads the connection

    def take(self, update: Update) -> None:
        """Take what is new of one answer."""
        self.answers[update.index].received.take(update)

    def take_prompt_scores(self, logprobs: Sequence[Sequence[Entry]]) -> None:
        """Take the log-probabilities of the prompt's next tokens; its first ones have none."""
        if self.prompt_logprobs is None:
            self.prompt_logprobs = [None for _ in range(self._unscored)]
        self.prompt_logprobs += map(entries_of, logprobs)

    def take_piece(self, piece: EmittedPiece) -> None:
        """Take what was emitted of an answer's next tokens."""
        self.answers[piece.index].received.pieces.setdefault(piece.key, []).append(piece)

    def take_vector(self, numbers: bytes) -> None:
        """Take the vector of the prompt, which has one answer."""
        self.answers[0].received.pooled = array("f", numbers)

    def finish(self, summary: Summary) -> None:
        """Take what is measured, once all answers have ended."""
        self.figures = Figures(
            cached_tokens=summary.cached_tokens,
            queue_seconds=summary.queue_seconds,
            first_token_seconds=summary.first_token_seconds,
            seconds=summary.seconds,
        )

    def fail(self, error: Exception) -> None:
        for answer in self.answers:
            if not answer.done:
                answer.received.error, answer.received.finish_reason = error, "error"
        self.refused = error
        seconds = time.monotonic() - self._submitted
        self.figures = Figures(cached_tokens=0, queue_seconds=None, first_token_seconds=None, seconds=seconds)

    def _catch_up(self) -> None:
        self.read_text()

    def read_text(self) -> None:
        """Make the text of the tokens that have come."""
        with self._reading:
            for answer in self.answers:
                answer.read_text()
