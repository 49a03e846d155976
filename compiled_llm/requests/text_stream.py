"""The text of an answer, piece by piece, for threads and for event loops."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

from compiled_llm.requests.listeners import Listeners
from compiled_llm.requests.pending_answer import PendingAnswer

if TYPE_CHECKING:  # imports torch
    from compiled_llm.requests.answer_text import AnswerText


class TextStream:
    """Pieces of an answer's text as they come, for ``for`` and ``async for``; each loop begins with the first.

    A piece has whole characters, and nothing that may become part of a stop string. Joined, pieces are the ``text`` of
    the output.
    """

    def __init__(self, answer: PendingAnswer, text: AnswerText, listeners: Listeners) -> None:
        self._answer = answer
        self._text = text
        self._listeners = listeners

    def __iter__(self) -> Iterator[str]:
        """Yield the pieces as they come; an answer that has failed raises its error."""
        text, given = self._text, 0
        while not self._is_over(given):
            self._wait(given)
            if text.shown > given:
                piece = text.text[given : text.shown]
                given += len(piece)
                yield piece
        self._raise_error()

    async def __aiter__(self) -> AsyncIterator[str]:
        """As ``__iter__``, for ``async for``."""
        text, given = self._text, 0
        with self._listeners.listening() as event:
            while not self._is_over(given):
                event.clear()
                if text.shown > given:
                    piece = text.text[given : text.shown]
                    given += len(piece)
                    yield piece
                elif not self._is_over(given):
                    await event.wait()
        self._raise_error()

    def _wait(self, given: int) -> None:
        self._listeners.wait_until(lambda: self._text.shown > given or self._is_over(given))

    def _is_over(self, given: int) -> bool:
        """Whether no more comes; the request has ended too, so that its result is there."""
        return self._text.ended and self._text.shown == given and self._answer.done

    def _raise_error(self) -> None:
        if self._answer.error is not None:
            raise self._answer.error
