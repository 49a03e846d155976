"""An answer as it comes, token by token or text by text, for threads and for event loops."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from compiled_llm.requests.answer import Answer
from compiled_llm.requests.listeners import Listeners
from compiled_llm.requests.outputs import Logprob

if TYPE_CHECKING:  # imports torch
    from compiled_llm.requests.text.answer_text import AnswerText

T = TypeVar("T")


class _AnswerStream(ABC, Generic[T]):
    """Parts of an answer as they come, for ``for`` and ``async for``; each loop begins with the first."""

    def __init__(self, answer: Answer, listeners: Listeners) -> None:
        self._answer = answer
        self._listeners = listeners

    def __iter__(self) -> Iterator[T]:
        """Yield the parts as they come; an answer that has failed raises its error."""
        given, over = 0, False
        while not over:
            over = self._has_ended()  # first: no part comes after the end
            parts, given = self._parts(given)
            yield from parts
            if not (parts or over):
                self._wait(given)
        self._raise_error()

    def _wait(self, given: int) -> None:
        self._listeners.wait_until(lambda: bool(self._parts(given)[0]) or self._has_ended())

    async def __aiter__(self) -> AsyncIterator[T]:
        given, over = 0, False
        with self._listeners.listening() as wakeup:
            while not over:
                wakeup.is_set = False  # first: what comes from now on sets it
                over = self._has_ended()
                parts, given = self._parts(given)
                for part in parts:
                    yield part
                if not (over or wakeup.is_set):
                    await wakeup.wait()
        self._raise_error()

    @abstractmethod
    def _has_ended(self) -> bool:
        """Whether no more comes than has come."""

    @abstractmethod
    def _parts(self, given: int) -> tuple[Sequence[T], int]:
        """Return what has come since, and how much has been given with that."""

    def _raise_error(self) -> None:
        if self._answer.error is not None:
            raise self._answer.error


class Token(NamedTuple):
    """One token of an answer: its ``id`` in the vocabulary, and ``logprobs`` as those of a ``Completion``."""

    id: int
    logprobs: dict[int, Logprob] | None


class _TokensOfAnswer(_AnswerStream[T]):
    """A stream of as many parts as the answer has tokens."""

    def _has_ended(self) -> bool:
        return self._answer.done


class IdStream(_TokensOfAnswer[int]):
    """The ids of an answer's tokens as they come, for ``for`` and ``async for``; each loop begins with the first."""

    def _parts(self, given: int) -> tuple[Sequence[int], int]:
        ids = self._answer.tokens_after(given)
        return ids, given + len(ids)


class TokenStream(_TokensOfAnswer[Token]):
    """An answer's tokens as they come, for ``for`` and ``async for``; each loop begins with the first."""

    def _parts(self, given: int) -> tuple[Sequence[Token], int]:
        tokens = self._answer.tokens_after(given)
        entries = self._answer.rows("logprobs", given, tokens) if tokens else None
        if entries is None:
            found = [Token(token, None) for token in tokens]
        else:
            found = [Token(*both) for both in zip(tokens, entries, strict=False)]
        return found, given + len(found)


class TextStream(_AnswerStream[str]):
    """Pieces of an answer's text as they come, for ``for`` and ``async for``; each loop begins with the first.

    A piece has whole characters, and nothing that may become part of a stop string. Joined, pieces are the ``text`` of
    the output.
    """

    def __init__(self, answer: Answer, text: AnswerText, listeners: Listeners) -> None:
        super().__init__(answer, listeners)
        self._text = text

    def _has_ended(self) -> bool:
        return self._text.ended and self._answer.done  # the request too, so that its result is there

    def _parts(self, given: int) -> tuple[Sequence[str], int]:
        piece = self._text.text[given : self._text.shown]
        return [piece] if piece else [], given + len(piece)
