"""Answers of one HTTP request on their way, and the new parts of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import NamedTuple

from starlette.requests import Request

from compiled_llm.requests.answer import Answer
from compiled_llm.requests.handle import RequestHandle
from compiled_llm.requests.listeners import Wakeup
from compiled_llm.server.http.api_error import ApiError
from compiled_llm.server.http.worker_thread import in_thread_if_long
from compiled_llm.server.openai.common.usage import FinishReason, finish_reason_of

logger = logging.getLogger("compiled_llm.server")

CHARACTERS = 4  # of a token, about
_LOOKING = 0.5  # seconds between two looks whether a client reads


class Answers:
    """Answers to one HTTP request; those of a client that leaves, or reads nothing, are cancelled and free their pages.

    Args:
        keeps_ends: whether the token that has ended an answer is told of as the others are.
        max_unsent: tokens that may wait for a client that does not read a stream.
        stream_interval: tokens of an answer that are told of together, between its first and its last.
        named: the client's own fields by the names with which errors of the engine begin, which does not know them.
    """

    def __init__(
        self,
        handles: Sequence[RequestHandle],
        request: Request,
        keeps_ends: bool,
        max_unsent: int,
        stream_interval: int = 1,
        named: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.handles = handles
        self.interval = stream_interval
        self._keeps_ends = keeps_ends
        self._max_unsent = max_unsent
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

    @contextmanager
    def listening(self) -> Iterator[Wakeup]:
        """Yield what is set at each change; of a stream, at each that is due."""
        wakeup = Wakeup() if self.interval == 1 else _IntervalWakeup(self._is_due)
        with ExitStack() as listening:
            for handle in self.handles:
                listening.enter_context(handle.listeners.listening(wakeup))
            yield wakeup

    def have_ended(self) -> bool:
        """Return whether all have ended; asked before they are read. Raises why one has failed."""
        if self._unread is not None:
            raise self._unread
        ended = True
        for handle in self.handles:
            ended &= handle.done
            if handle.refused is not None:
                raise self._as_sent(handle.refused)
            for answer in handle.answers:
                if answer.record.finish_reason is not None and (error := answer.error) is not None:
                    raise self._as_sent(error)
                ended &= answer.text is None or answer.text.ended  # it is made after the last token has come
        return ended

    def _as_sent(self, error: BaseException) -> BaseException:
        """Return an error by the name of the client's own field."""
        message = str(error)
        engines = next((name for name in self._named if message.startswith(name)), None)
        return error if engines is None else type(error)(self._named[engines] + message.removeprefix(engines))

    async def begun(self) -> None:
        """Wait for the first token, or raise why there is none."""
        records = [record for handle in self.handles for record in handle.requests]
        await self._until(lambda: self.have_ended() or any(record.tokens for record in records))

    async def ended(self) -> list[AnswerDelta]:
        """Wait for the end, and return all answers, or raise why one has failed."""
        await self._until(self.have_ended)
        return await in_thread_if_long(self._whole, self.characters)

    async def _until(self, over: Callable[[], bool]) -> None:
        with self.listening() as wakeup:
            while not over():
                await wakeup.wait()
                wakeup.is_set = False

    @property
    def characters(self) -> int:
        """About how many characters they are as JSON: reading and writing them takes so long."""
        records = [record for handle in self.handles for record in handle.requests]
        columns: int = sum(column.characters for record in records for column in record.parts.values())
        return CHARACTERS * sum(len(record.tokens) for record in records) + columns

    def _whole(self) -> list[AnswerDelta]:
        found = []
        for handle in self.handles:
            for answer, completion in zip(handle.answers, handle.output().outputs, strict=True):
                tokens, told = completion.token_ids, self.count_told(answer)
                reason = finish_reason_of(completion.finish_reason)
                ending, stop_reason = tuple(tokens[told:]), completion.stop_reason
                text = completion.text or ""
                found.append(AnswerDelta(answer, text, 0, tokens[:told], reason, len(tokens), ending, stop_reason))
        return found

    def count_told(self, answer: Answer) -> int:
        """Return how many tokens of an answer that has ended are told of."""
        tokens, ends = answer.record.tokens, answer.record.stop_token_ids
        return len(tokens) - (bool(tokens) and tokens[-1] in ends and not self._keeps_ends)

    def choices(self) -> list[Choice]:
        """Return the answers, to be told of as they come."""
        every = [(handle, answer) for handle in self.handles for answer in handle.answers]
        self._choices = [Choice(number, *each, self) for number, each in enumerate(every)]
        self._look_later()
        return self._choices

    def _is_due(self) -> bool:
        """Whether there is something to be told of at once; any change, if the answers are not streamed."""
        streamed, ended = bool(self._choices), all(handle.done for handle in self.handles)
        return not streamed or ended or any(choice.is_due for choice in self._choices)

    # ---- clients that do not read

    def _look_later(self) -> None:
        self._looking = asyncio.get_running_loop().call_later(_LOOKING, self._look)

    def _look(self) -> None:
        """End all if the client does not read: up to a limit, the parts that come meanwhile become one."""
        if sum(choice.unsent for choice in self._choices if choice.is_due) <= self._max_unsent:
            self._look_later()
            return
        message = f"the client has not read, and more than {self._max_unsent:,} tokens wait for it"
        logger.warning("compiled_llm: a request ends: %s", message)
        self._unread = ApiError(408, message, code="not_read")
        self.cancel()


class _IntervalWakeup(Wakeup):
    """Lets the stream's task sleep while too little has come: it is not woken for each token."""

    def __init__(self, is_due: Callable[[], bool]) -> None:
        super().__init__()
        self._is_due = is_due

    def set(self) -> None:
        if self._is_due():
            super().set()


class AnswerDelta(NamedTuple):
    """The new part of an answer, or all of it."""

    answer: Answer
    text: str  # that is certain by now
    start: int  # the number of the first of its tokens
    tokens: list[int]  # that were read for it
    finish_reason: FinishReason | None  # why the answer has ended; None while it has not
    total: int  # tokens of the answer so far, the one that has ended it included
    ending: tuple[int, ...] = ()  # the token that has ended it, if it is not told of
    stop_reason: int | str | None = None  # the stop string, or the one of ``stop_token_ids``, that has ended it

    @property
    def token_ids(self) -> list[int]:
        return [*self.tokens, *self.ending]


class Choice:
    """A cursor over one answer of a stream."""

    def __init__(self, index: int, handle: RequestHandle, answer: Answer, answers: Answers) -> None:
        handle.text(answer.index)  # from now on it is decoded as it comes
        self.index = index
        self.handle = handle
        self._answer = answer
        self._answers = answers
        self._text = answer.begin_text()
        self._characters = self._tokens = 0
        self._finished = False

    @property
    def unsent(self) -> int:
        return self._answer.tokens - self._tokens

    @property
    def is_due(self) -> bool:
        """Whether there is enough to tell of: the first token, as many as an interval has, or the last."""
        if self._finished:
            return False
        return not self._tokens or self.unsent >= self._answers.interval or self._answer.done

    def delta(self) -> AnswerDelta | None:
        """Return the new part; None if there is none, or too little."""
        if self._finished or (self._answers.interval > 1 and not self.is_due):
            return None
        record, text, start = self._answer.record, self._text, self._tokens
        count = text.count  # first: if it is not over, none of these has ended it
        self._finished = record.finish_reason is not None and text.ended
        tokens = record.tokens[start : self._answers.count_told(self._answer) if self._finished else count]
        piece = text.text[self._characters : text.shown]
        if not (piece or tokens or self._finished):
            return None
        self._characters += len(piece)
        self._tokens += len(tokens)
        if not self._finished:
            return AnswerDelta(self._answer, piece, start, tokens, None, self._tokens)
        ending, reason = tuple(record.tokens[self._tokens :]), finish_reason_of(record.finish_reason)
        return AnswerDelta(self._answer, piece, start, tokens, reason, len(record.tokens), ending, record.stop_reason)
