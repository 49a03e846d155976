"""Answers on their way, for who waits for them in any thread and any event loop, in the engine's process or another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

from compiled_llm.engine.listeners import Listeners
from compiled_llm.engine.output import RequestOutput


class PendingAnswer(Protocol):
    """One answer on its way."""

    @property
    def done(self) -> bool:
        """Whether it has ended."""

    @property
    def tokens(self) -> int:
        """How many tokens it has."""

    @property
    def error(self) -> BaseException | None:
        """What has ended it with ``"error"``."""

    def tokens_behind(self, count: int) -> list[int]:
        """Return its tokens behind the first ``count``."""


A = TypeVar("A", bound=PendingAnswer)


class PendingAnswers(ABC, Generic[A]):
    """A prompt's answers on their way: iterate over the tokens, or wait for the ``result``.

    Attributes:
        listeners: who waits for them.
        answers: to be read only.
    """

    def __init__(self, answers: Sequence[A], listeners: Listeners) -> None:
        """Wait for answers.

        Args:
            answers: to one prompt.
            listeners: told whenever a token has come or an answer has ended.
        """
        self.answers = answers
        self.listeners = listeners

    @property
    def done(self) -> bool:
        """Whether all answers have ended."""
        return all(answer.done for answer in self.answers)

    @abstractmethod
    def cancel(self, index: int | None = None) -> None:
        """End what has not ended, or the answer of that index alone; tokens so far stay."""

    @abstractmethod
    def output(self) -> RequestOutput:
        """Return what it came to, errors included, once it is ``done``."""

    def when_changed(self, listener: Callable[[], object]) -> None:
        """Have ``listener`` called whenever a token has come or an answer has ended; it has to be quick.

        One that listens to several requests is called once for all that a step has changed.
        """
        self.listeners.add(listener)

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the end.

        Args:
            timeout: seconds to wait at most; None for as long as it takes.

        Raises:
            TimeoutError: it has not ended by then; it goes on.
            RuntimeError: it cannot end meanwhile, because this thread has paused the engine, or runs it.
            Exception: what ended an answer with the finish reason ``"error"``.
        """
        if not self.listeners.wait_until(lambda: self.done, timeout):
            raise TimeoutError(f"the request has not ended after {timeout} s; it goes on, unless you cancel() it")
        output = self.output()
        for answer in output.outputs:
            if answer.error is not None:
                raise answer.error
        return output

    def __iter__(self) -> Iterator[int]:
        """Yield the tokens as they come.

        Raises:
            ValueError: there are several answers.
            Exception: what ended it with the finish reason ``"error"``.
        """
        answer, count = self._only(), 0
        while not (answer.done and count == answer.tokens):
            yield from (new := self._behind(answer, count))
            count += len(new)
        self._raise_error()

    def _behind(self, answer: PendingAnswer, count: int) -> list[int]:
        """Wait for more than ``count`` tokens or the end, and return those behind them."""
        self.listeners.wait_until(lambda: answer.tokens > count or answer.done)
        return answer.tokens_behind(count)

    async def __aiter__(self) -> AsyncIterator[int]:
        """As ``__iter__``, for ``async for``."""
        answer, count = self._only(), 0
        with self.listeners.listening() as event:
            while True:
                event.clear()
                ended, new = answer.done, answer.tokens_behind(count)
                for token in new:
                    yield token
                count += len(new)
                if ended and count == answer.tokens:
                    break
                if not (new or ended):
                    await event.wait()
        self._raise_error()

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        """Return the result, for ``await``."""
        return self._ended().__await__()

    async def _ended(self) -> RequestOutput:
        with self.listeners.listening() as event:
            while not self.done:
                event.clear()
                if not self.done:
                    await event.wait()
        return self.result()

    def _only(self) -> A:
        if len(self.answers) > 1:
            raise ValueError(f"n={len(self.answers)}: several answers have no one stream; use text(index) or result()")
        return self.answers[0]

    def _raise_error(self) -> None:
        for answer in self.answers:
            if (error := answer.error) is not None:
                raise error
