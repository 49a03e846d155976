"""The result of ``submit``: a prompt's answers on their way."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from compiled_llm.engine.answer import Answer
from compiled_llm.engine.steps.request import Request, RequestError
from compiled_llm.requests.outputs import Figures, RequestOutput
from compiled_llm.requests.pending import PendingAnswers
from compiled_llm.requests.text.answer_text import AnswerText, TextFormat


class RequestHandle(PendingAnswers[Answer]):
    """A submitted prompt: iterate over its tokens or its ``text``, wait for its ``result``, or ``cancel`` it.

    Any thread may use it; ``async for`` and ``await`` work in any event loop.

    Attributes:
        requests: the answers as the engine's loop knows them, to be read only.
        answers: the same as their reader sees them, to be read only.
        listeners: called when they have changed; ``end_listeners``, when one has ended.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        cancel: Callable[..., None],
        form: TextFormat | None = None,
        read: Callable[[Sequence[RequestHandle]], None] | None = None,
        check: Callable[[], None] = lambda: None,
        check_process: Callable[[], None] = lambda: None,
    ) -> None:
        """Wait for the answers to one prompt; ``form`` and ``read`` make their text, if there is a tokenizer."""
        # ``check`` raises an error in a thread that must not wait, because the engine does not run meanwhile,
        # ``check_process`` in a process that does not have the engine.
        super().__init__([Answer(request, form) for request in requests], check, check_process)
        self.requests = requests
        for request in requests:
            request.listeners = self.listeners
        self.has_text = form is not None and bool(form.stop)
        self._cancel = cancel
        self._read = read

    def _place(self, answer: Answer) -> str:
        return answer.finish_reason or answer.request.place

    @property
    def awaited(self) -> bool:
        """Whether anyone reads its tokens or text while it runs."""
        return self.has_text or self.listeners.count > 0

    def cancel(self, index: int | None = None) -> None:
        """End what has not ended, or the answer of that index alone; tokens so far stay."""
        self._cancel([entry for entry in self.requests if not entry.done and index in (None, entry.index)])

    def fail(self, error: BaseException) -> None:
        """End what has not ended, with an error; tokens so far stay."""
        self._cancel([entry for entry in self.requests if not entry.done], "error", error)

    def output(self) -> RequestOutput:
        """Return what it came to, errors included, once it is ``done``."""
        first = self.requests[0]
        scores = first.part("logprobs")
        return RequestOutput(
            prompt_token_ids=first.prompt_ids.tolist(),
            outputs=[answer.completion() for answer in self.answers],
            prompt_logprobs=None if scores is None else scores.entries_of_prompt(),
            **self.figures(),
        )

    def figures(self) -> Figures:
        """Return the figures of the output, once it is ``done``."""
        first, now = self.requests[0], time.monotonic()
        firsts = [request.first_token for request in self.requests if request.first_token is not None]
        ends = [now if request.finished is None else request.finished for request in self.requests]
        return Figures(
            cached_tokens=first.cached or 0,
            queue_seconds=None if first.admitted is None else first.admitted - first.submitted,
            first_token_seconds=min(firsts) - first.submitted if firsts else None,
            seconds=max(ends) - first.submitted,
        )

    def raise_failure(self) -> None:
        """Raise what ended all requests, if this is how it ended."""
        for answer in self.answers:
            if (error := answer.error) is not None and not isinstance(error, RequestError):
                raise error

    def _catch_up(self) -> None:
        if self._read is not None:
            self._read([self])

    # ---- used by the engine

    def read_text(self) -> None:
        """Make the text of the tokens that have come, and end an answer that a stop string has ended."""
        with self._reading:
            for answer in self.answers:
                if answer.text is not None and not answer.text.ended:
                    answer.read_text()
                    self._end_with(answer, answer.text)

    def lose_text(self, error: RequestError) -> None:
        """End the answers whose text has not ended: it cannot be made."""
        with self._reading:
            for answer in self.answers:
                if answer.text is not None and not answer.text.ended:
                    answer.text.fail(error)
                    self._end_with(answer, answer.text)

    def _end_with(self, answer: Answer, text: AnswerText) -> None:
        if text.ended and not answer.request.done:
            self._cancel([answer.request], "stop" if text.error is None else "error", text.error)
