"""``submit`` returns this: a prompt's answers on their way, from an engine in this process or in another."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from compiled_llm.requests.answer import Answer, AnswerRecord, TextOwner
from compiled_llm.requests.listeners import Listeners
from compiled_llm.requests.outputs import Figures, FinishReason, Logprob, RequestOutput
from compiled_llm.requests.streams import IdStream, TextStream, TokenStream

if TYPE_CHECKING:  # imports torch
    from compiled_llm.requests.text.answer_text import TextFormat


class AnswerSource(TextOwner, Protocol):
    """Where answers come from: an engine in this process, or a connection to one."""

    def end(
        self, requests: Sequence[Any], index: int | None, reason: FinishReason, error: BaseException | None
    ) -> None:
        """End those that have not ended, or the one of an index; tokens so far stay."""
        ...

    def figures(self, requests: Sequence[Any]) -> Figures:
        """Return what was measured, once they have ended."""
        ...

    def read(self, handle: RequestHandle) -> None:
        """Have the text made of the tokens that have come already."""
        ...

    def check_may_wait(self) -> None:
        """Raise in a thread that must not wait, because nothing comes meanwhile."""
        ...

    def check_process(self) -> None:
        """Raise in a process in which nothing changes."""
        ...


class RequestHandle:
    """A submitted prompt: iterate over its tokens or its ``text``, wait for its ``result``, or ``cancel`` it.

    Any thread may use it; ``async for`` and ``await`` work in any event loop.

    Attributes:
        requests: the answers as the engine's loop knows them, or as they have come, to be read only.
        answers: the same as their reader sees them, to be read only.
        listeners: called when they have changed; ``end_listeners``, when one has ended.
        refused: why an engine process has ended the whole request, or never began it.
    """

    def __init__(
        self,
        requests: Sequence[AnswerRecord[Any]],
        prompt: Sequence[int],
        source: AnswerSource,
        form: TextFormat | None = None,
    ) -> None:
        """Wait for the answers to one prompt; ``form`` says how they become text, if there is a tokenizer."""
        self.requests: Sequence[Any] = requests
        self.prompt = prompt
        self.listeners = Listeners(source.check_may_wait, source.check_process)
        # Who waits for ends alone is not woken for each token.
        self.end_listeners = Listeners(source.check_may_wait, source.check_process)
        self.answers = [Answer(record, source, form) for record in requests]
        # whether text is made of the tokens as they come
        self.has_text = source.is_engine and form is not None and bool(form.stop)
        self.refused: Exception | None = None
        self._source = source
        self._complete = source.is_engine  # whether nothing more comes once all answers have ended
        self._figures: Figures | None = None
        self.submitted = time.monotonic()
        self._reading = threading.Lock()

    def __repr__(self) -> str:
        tokens = ", ".join(str(answer.tokens) for answer in self.answers)
        places = (answer.finish_reason or answer.record.place for answer in self.answers)
        return f"<{type(self).__name__}: {tokens} tokens, {', '.join(places)}>"

    @property
    def done(self) -> bool:
        """Whether all answers have ended."""
        return self._complete and all(answer.done for answer in self.answers)

    @property
    def figures(self) -> Figures | None:
        """What was measured, once the request has ended; None before."""
        if self._figures is None and self.done:
            self._figures = self._source.figures(self.requests)
        return self._figures

    @property
    def cached_tokens(self) -> int:
        """How many of the prompt's tokens the prefix cache had; 0 until the request has ended."""
        return 0 if self.figures is None else self.figures["cached_tokens"]

    @property
    def prompt_logprobs(self) -> Sequence[dict[int, Logprob] | None] | None:
        """Those of the prompt's tokens, as far as they have come; None before that, or if they are not wanted."""
        found: Sequence[dict[int, Logprob] | None] | None = self._of_prompt().get("prompt_logprobs")
        return found

    def _of_prompt(self) -> dict[str, Any]:
        """Return the fields of ``RequestOutput`` that columns fill."""
        found: dict[str, Any] = {}
        for column in self.requests[0].parts.values():
            found |= column.output()
        return found

    def cancel(self, index: int | None = None) -> None:
        """End what has not ended, or the answer of that index alone; tokens so far stay."""
        if not self.done:
            self._source.end(self.requests, index, "cancelled", None)

    def fail(self, error: BaseException) -> None:
        """End what has not ended, with an error; tokens so far stay."""
        self._source.end(self.requests, None, "error", error)

    def output(self) -> RequestOutput:
        """Return what it came to, errors included, once it is ``done``."""
        figures = self._figures or self._source.figures(self.requests)
        if not self._source.is_engine:
            with self._reading:
                for answer in self.answers:
                    answer.read_to_stop()
        return RequestOutput(
            prompt_token_ids=list(self.prompt),
            outputs=[answer.completion() for answer in self.answers],
            **figures,
            **self._of_prompt(),
        )

    def when_changed(self, listener: Callable[[], object]) -> None:
        """Call ``listener`` when a token has come or an answer has ended (once a step for several): be quick."""
        self.listeners.add(listener)

    def when_ended(self, listener: Callable[[], object]) -> None:
        """Call ``listener`` when an answer has ended (once a step for several): be quick."""
        self.end_listeners.add(listener)

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the end, ``timeout`` seconds at most.

        Raises:
            TimeoutError: it has not ended by then; it goes on.
            RuntimeError: it cannot end meanwhile, because this thread has paused the engine, or runs it.
            Exception: the error that ended an answer with the finish reason ``"error"``.
        """
        if not self.end_listeners.wait_until(lambda: self.done, timeout):
            raise TimeoutError(f"the request has not ended after {timeout} s; it goes on, unless you cancel() it")
        output = self.output()
        for answer in output.outputs:
            if answer.error is not None:
                raise answer.error
        return output

    def tokens(self, index: int | None = None) -> TokenStream:
        """Return an answer's tokens with their log-probabilities, to be read with ``for`` or ``async for``.

        Raises:
            ValueError: there are several answers, and no ``index``.
        """
        return TokenStream(self._only() if index is None else self.answers[index], self.listeners)

    def text(self, index: int | None = None) -> TextStream:
        """Return an answer's text, to be read piece by piece with ``for`` or ``async for``.

        Raises:
            ValueError: there are several answers and no ``index``, or there is no tokenizer.
        """
        answer = self._only() if index is None else self.answers[index]
        self.listeners.check_process()
        with self._reading:
            text, self.has_text = answer.begin_text(), True
        self.listeners.change_audience()
        self._source.read(self)
        return TextStream(answer, text, self.listeners)

    def __iter__(self) -> Iterator[int]:
        """Yield the tokens' ids as they come; ValueError if there are several answers; an answer's error is raised."""
        return iter(IdStream(self._only(), self.listeners))

    def __aiter__(self) -> AsyncIterator[int]:
        return aiter(IdStream(self._only(), self.listeners))

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        return self._ended().__await__()

    async def _ended(self) -> RequestOutput:
        with self.end_listeners.listening() as wakeup:
            while not self.done:
                wakeup.is_set = False
                if not self.done:
                    await wakeup.wait()
        return self.result()

    def _only(self) -> Answer:
        if len(self.answers) > 1:
            raise ValueError(
                f"n={len(self.answers)}: several answers have no one stream; use tokens(index), text(index) or result()"
            )
        return self.answers[0]

    # ---- used by the source

    @property
    def awaiting(self) -> list[Listeners]:
        """Who hears that it has changed: once an answer has ended, those who wait for an end as well."""
        ended = any(answer.done for answer in self.answers)
        return [self.listeners, self.end_listeners] if ended else [self.listeners]

    @property
    def awaited(self) -> bool:
        """Whether anyone reads its tokens or text while it runs."""
        return self.has_text or self.listeners.count > 0

    def finish(self, figures: Figures, refused: Exception | None = None) -> None:
        """Have ended: nothing more comes."""
        self._figures, self.refused = figures, refused
        self._complete = True  # last: a thread that sees it finds the rest

    def read_text(self) -> None:
        """Make the text of the tokens that have come; in an engine, end an answer that a stop string has ended."""
        with self._reading:
            for answer in self.answers:
                if answer.text is not None and not answer.text.ended:
                    answer.read_text()
                    if answer.text.ended:
                        self._end_with_text(answer)

    def lose_text(self, error: RuntimeError) -> None:
        """End the answers whose text has not ended: it cannot be made."""
        with self._reading:
            for answer in self.answers:
                if answer.text is not None and not answer.text.ended:
                    answer.text.fail(error)
                    self._end_with_text(answer)

    def _end_with_text(self, answer: Answer) -> None:
        text = answer.text
        if self._source.is_engine and text is not None and text.ended and not answer.record.done:
            reason: FinishReason = "stop" if text.error is None else "error"
            self._source.end(self.requests, answer.index, reason, text.error)
