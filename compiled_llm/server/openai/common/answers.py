"""Answers of one HTTP request on their way, and the new parts of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence, Sized
from contextlib import ExitStack, aclosing
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from starlette.requests import Request

from compiled_llm.client.answer import RemoteAnswer
from compiled_llm.client.handle import RemoteHandle
from compiled_llm.protocol.messages import Entry
from compiled_llm.requests.listeners import Wakeup
from compiled_llm.requests.outputs import Completion
from compiled_llm.requests.text.answer_text import AnswerText
from compiled_llm.server.http.api_error import ApiError
from compiled_llm.server.http.worker_thread import in_thread_if_long
from compiled_llm.server.openai.common.usage import FinishReason, finish_reason_of

logger = logging.getLogger("compiled_llm.server")

CHARACTERS = 4  # of a token, about
_OF_ENTRY = 40  # characters of text that take as long as one log-probability
_LOOKING = 0.5  # seconds between two looks whether a client reads


class Answers:
    """Answers to one HTTP request; those of a client that leaves, or reads nothing, are cancelled and free their pages.

    Args:
        max_unsent: tokens that may wait for a client that does not read a stream.
        stream_interval: tokens of an answer that are told of together, between its first and its last.
        named: the client's own fields by the names with which errors of the engine begin, which does not know them.
    """

    def __init__(
        self,
        handles: Sequence[RemoteHandle],
        request: Request,
        keeps_ends: bool,
        max_unsent: int,
        stream_interval: int = 1,
        named: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.handles = handles
        self.finished = False  # whether all have ended, at the last of ``changes`` and after it
        self._keeps_ends = keeps_ends
        self._max_unsent = max_unsent
        self._interval = stream_interval
        self._named = named
        self._choices: list[Choice] = []
        self._unread: ApiError | None = None
        self._looking: asyncio.TimerHandle | None = None
        self._watching = asyncio.create_task(self._watch(request))

    async def _watch(self, request: Request) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.cancel()

    def cancel(self) -> None:
        for handle in self.handles:
            handle.cancel()

    def close(self) -> None:
        """Cancel them, and watch the client no more."""
        self.cancel()
        self._watching.cancel()
        if self._looking is not None:
            self._looking.cancel()

    async def changes(self) -> AsyncGenerator[None, None]:
        """Yield at each change (a stream: at each that is due) until all have ended; raise why one has failed."""
        wakeup = Wakeup() if self._interval == 1 else _IntervalWakeup(self._is_due)
        with ExitStack() as listening:
            for handle in self.handles:
                listening.enter_context(handle.listeners.listening(wakeup))
            self.finished = False
            while not self.finished:
                wakeup.is_set = False
                self.finished = self._are_finished()
                yield
                if not self.finished:
                    await wakeup.wait()

    async def begun(self) -> None:
        """Wait for the first token, or raise why there is none."""
        async with aclosing(self.changes()) as changes:  # else the event loop is woken to close it
            async for _ in changes:
                if any(answer.tokens for handle in self.handles for answer in handle.answers):
                    return

    async def ended(self) -> list[Completion]:
        """Wait for the end, and return all answers, or raise why one has failed."""
        async for _ in self.changes():
            pass
        return await in_thread_if_long(self._completions, self.characters)

    @property
    def characters(self) -> int:
        """About how many characters they are as JSON: reading and writing them takes so long."""
        answers = [answer for handle in self.handles for answer in handle.answers]
        entries = sum(_entries(answer.received.logprobs or ()) for answer in answers)
        entries += sum(_entries(handle.prompt_logprobs or ()) for handle in self.handles)
        return CHARACTERS * sum(answer.tokens for answer in answers) + _OF_ENTRY * entries

    def _completions(self) -> list[Completion]:
        return [
            replace(completion, logprobs=completion.logprobs and completion.logprobs[: self._count_told(answer)])
            for handle in self.handles
            for answer, completion in zip(handle.answers, handle.output().outputs, strict=True)
        ]

    def _count_told(self, answer: RemoteAnswer) -> int:
        tokens, ends = answer.received.tokens, answer.received.stop_token_ids
        return len(tokens) - (bool(tokens) and tokens[-1] in ends and not self._keeps_ends)

    def _is_due(self) -> bool:
        """Whether there is something to be told of at once; any change, if the answers are not streamed."""
        streamed, ended = bool(self._choices), all(handle.done for handle in self.handles)
        return not streamed or ended or any(choice.is_due for choice in self._choices)

    def _are_finished(self) -> bool:
        """Whether all have ended; asked before they are read. Raises why one has failed."""
        if self._unread is not None:
            raise self._unread
        finished = True
        for handle in self.handles:
            finished &= handle.done
            if handle.refused is not None:
                raise self._as_sent(handle.refused)
            for answer in handle.answers:
                if answer.done and answer.error is not None:
                    raise self._as_sent(answer.error)
                finished &= answer.text is None or answer.text.ended  # it is made after the last token has come
        return finished

    def _as_sent(self, error: BaseException) -> BaseException:
        """Return an error by the name of the client's own field."""
        message = str(error)
        engines = next((name for name in self._named if message.startswith(name)), None)
        return error if engines is None else type(error)(self._named[engines] + message.removeprefix(engines))

    def choices(self) -> list[Choice]:
        every = [(handle, answer) for handle in self.handles for answer in handle.answers]
        self._choices = [
            Choice(number, handle, answer, self._count_told, self._interval)
            for number, (handle, answer) in enumerate(every)
        ]
        self._look_later()
        return self._choices

    # ---- clients that do not read

    def _look_later(self) -> None:
        self._looking = asyncio.get_running_loop().call_later(_LOOKING, self._look)

    def _look(self) -> None:
        """End all if the client does not read: up to a limit, the parts that come meanwhile become one."""
        if sum(choice.untold for choice in self._choices if choice.is_due) <= self._max_unsent:
            self._look_later()
            return
        message = f"the client has not read, and more than {self._max_unsent:,} tokens wait for it"
        logger.warning("compiled_llm: a request ends: %s", message)
        self._unread = ApiError(408, message, code="not_read")
        self.cancel()


def _entries(places: Sequence[Sized | None]) -> int:
    """Return how many log-probabilities there are, if all tokens have as many as the last."""
    return len(places) * len(places[-1] or ()) if places else 0


class _IntervalWakeup(Wakeup):
    """Lets the stream's task sleep while too little has come: it is not woken for each token."""

    def __init__(self, is_due: Callable[[], bool]) -> None:
        super().__init__()
        self._is_due = is_due

    def set(self) -> None:
        if self._is_due():
            super().set()


class News(NamedTuple):
    """The new part of an answer."""

    text: str  # that is certain by now
    tokens: list[int]  # that were read for it
    logprobs: list[list[Entry]] | None  # of these tokens, if they are wanted
    finish_reason: FinishReason | None  # why the answer has ended; None while it has not
    total: int = 0  # tokens of the answer so far, the one that has ended it included
    ending: tuple[int, ...] = ()  # the token that has ended it, if it is not told of
    stop_reason: int | str | None = None  # the stop string, or the one of ``stop_token_ids``, that has ended it

    @property
    def token_ids(self) -> list[int]:
        return [*self.tokens, *self.ending]

    @property
    def is_text(self) -> bool:
        """Whether there is nothing to tell but a text."""
        return self.logprobs is None and self.finish_reason is None


class Choice:
    """One answer of a stream; ``interval`` tokens are told of together, between the first and the last."""

    def __init__(
        self,
        index: int,
        handle: RemoteHandle,
        answer: RemoteAnswer,
        count_told: Callable[[RemoteAnswer], int],
        interval: int = 1,
    ) -> None:
        handle.text(answer.index)  # from now on it is decoded as it comes
        self.index = index
        self._answer = answer
        self._count_told = count_told
        self._interval = interval
        self._text: AnswerText = answer.begin_text()
        self._characters = self._tokens = 0
        self._finished = False

    @property
    def untold(self) -> int:
        return self._answer.tokens - self._tokens

    @property
    def is_due(self) -> bool:
        """Whether there is enough to tell of: the first token, as many as an interval has, or the last."""
        if self._finished:
            return False
        return not self._tokens or self.untold >= self._interval or self._answer.done

    def news(self) -> News | None:
        """Return the new part; None if there is none, or too little."""
        if not self.is_due:
            return None
        received, text = self._answer.received, self._text
        count = text.count  # first: if it is not over, none of these has ended it
        self._finished = received.done and text.ended
        tokens = received.tokens[self._tokens : self._count_told(self._answer) if self._finished else count]
        piece = text.text[self._characters : text.shown]
        if not (piece or tokens or self._finished):
            return None
        logprobs = received.logprobs and received.logprobs[self._tokens : self._tokens + len(tokens)]
        self._characters += len(piece)
        self._tokens += len(tokens)
        if not self._finished:
            return News(piece, tokens, logprobs, None, self._tokens)
        ending, reason = tuple(received.tokens[self._tokens :]), finish_reason_of(received.finish_reason)
        return News(piece, tokens, logprobs, reason, len(received.tokens), ending, received.stop_reason)
