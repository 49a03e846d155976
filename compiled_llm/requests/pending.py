"""Answers on their way, to be awaited in any thread and any event loop, in the engine's process or another."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from typing import Any, Generic, TypeVar

from compiled_llm.requests.listeners import Listeners
from compiled_llm.requests.outputs import RequestOutput
from compiled_llm.requests.pending_answer import PendingAnswer
from compiled_llm.requests.streams import IdStream, TextStream, TokenStream

A = TypeVar("A", bound=PendingAnswer)


class PendingAnswers(ABC, Generic[A]):
    """A prompt's answers on their way: iterate over the tokens, or wait for the ``result``."""

    def __init__(
        self,
        answers: Sequence[A],
        check: Callable[[], None] = lambda: None,
        check_process: Callable[[], None] = lambda: None,
    ) -> None:
        """``check`` and ``check_process`` are those of ``Listeners``."""
        self.answers = answers  # read-only
        self.listeners = Listeners(check, check_process)
        # Who waits for ends alone is not woken for each token.
        self.end_listeners = Listeners(check, check_process)
        self.has_text = False  # whether text is made of the tokens as they come
        self._reading = threading.Lock()

    def __repr__(self) -> str:
        tokens = ", ".join(str(answer.tokens) for answer in self.answers)
        return f"<{type(self).__name__}: {tokens} tokens, {', '.join(map(self._place, self.answers))}>"

    def _place(self, answer: A) -> str:
        return answer.finish_reason or "under way"

    @property
    def done(self) -> bool:
        return all(answer.done for answer in self.answers)

    @property
    def awaiting(self) -> list[Listeners]:
        """Who hears that it has changed: once an answer has ended, those who wait for an end as well."""
        ended = any(answer.done for answer in self.answers)
        return [self.listeners, self.end_listeners] if ended else [self.listeners]

    @abstractmethod
    def cancel(self, index: int | None = None) -> None:
        """End the unfinished answers, or the answer of that index alone; tokens so far stay."""

    @abstractmethod
    def output(self) -> RequestOutput:
        """Return the output once it is ``done``, errors included."""

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
        self._catch_up()
        return TextStream(answer, text, self.listeners)

    @abstractmethod
    def _catch_up(self) -> None:
        """Have the text made of the tokens that have come already."""

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

    def _only(self) -> A:
        if len(self.answers) > 1:
            raise ValueError(
                f"n={len(self.answers)}: several answers have no one stream; use tokens(index), text(index) or result()"
            )
        return self.answers[0]
