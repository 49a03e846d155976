"""The tokens of an answer as they come, with their log-probabilities, for threads and for event loops."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import NamedTuple

from compiled_llm.requests.listeners import Listeners
from compiled_llm.requests.outputs import Logprob
from compiled_llm.requests.pending_answer import PendingAnswer


class Token(NamedTuple):
    """One token of an answer: its ``id`` in the vocabulary, and ``logprobs`` as those of a ``Completion``."""

    id: int
    logprobs: dict[int, Logprob] | None


class TokenStream:
    """An answer's tokens as they come, for ``for`` and ``async for``; each loop begins with the first."""

    def __init__(self, answer: PendingAnswer, listeners: Listeners, scored: bool = True) -> None:
        """``scored``: yield log-probabilities; otherwise they are not computed."""
        self._scored = scored
        self._answer = answer
        self._listeners = listeners

    def __iter__(self) -> Iterator[Token]:
        """Yield the tokens as they come; an answer that has failed raises its error."""
        answer, count = self._answer, 0
        while not (answer.done and count == answer.tokens):
            yield from (new := self._behind(count))
            count += len(new)
        self._raise_error()

    def _behind(self, count: int) -> list[Token]:
        """Wait for more than ``count`` tokens or the end, and return those after them."""
        self._listeners.wait_until(lambda: self._answer.tokens > count or self._answer.done)
        return self._there_behind(count)

    async def __aiter__(self) -> AsyncIterator[Token]:
        """As ``__iter__``, for ``async for``."""
        answer, count = self._answer, 0
        with self._listeners.listening() as event:
            while True:
                event.clear()
                ended, new = answer.done, self._there_behind(count)
                for token in new:
                    yield token
                count += len(new)
                if ended and count == answer.tokens:
                    break
                if not (new or ended):
                    await event.wait()
        self._raise_error()

    def _there_behind(self, count: int) -> list[Token]:
        tokens = self._answer.tokens_behind(count)
        entries = self._answer.logprobs_behind(count) if tokens and self._scored else None
        if entries is None:
            return [Token(token, None) for token in tokens]
        return [Token(*both) for both in zip(tokens, entries, strict=False)]

    def _raise_error(self) -> None:
        if self._answer.error is not None:
            raise self._answer.error
