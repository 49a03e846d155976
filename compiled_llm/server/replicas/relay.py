"""A replica passes on requests of several API servers to its engine process, and the answers back."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from msgspec.structs import replace

from compiled_llm.client.errors import EngineDeadError
from compiled_llm.client.transport.connection import Line
from compiled_llm.protocol.frames import frame_of
from compiled_llm.protocol.messages import (
    AskStats,
    Cancel,
    FromEngine,
    Piece,
    Ready,
    Refused,
    StatsReply,
    StepUpdates,
    Submit,
    Summary,
    Update,
)

News = Update | Summary | Piece | Refused
"""An engine process's message about one request; a summary or a refusal is the last."""

_PAUSE = 0.005
"""Seconds between two messages of a request, in which updates are gathered: each costs Ray up to a millisecond."""


class _Request(NamedTuple):
    number: int  # that its API server has given it
    news: asyncio.Queue[News]


class Relay:
    """A relay of requests under numbers of its own, since those of two API servers may be equal."""

    def __init__(self, line: Line, lost: Callable[[EngineDeadError], None]) -> None:
        """Listen to an engine process from now on; ``lost`` is called in the event loop when it has gone."""
        self._loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[Ready] = self._loop.create_future()
        self._line = line
        self._lost = lost
        self._numbers = itertools.count(1)
        self._requests: dict[int, _Request] = {}
        self._asked: dict[int, asyncio.Future[StatsReply]] = {}
        line.start(self._take, self._lose)

    async def answer(self, submit: Submit) -> AsyncIterator[bytes]:
        """Yield the messages about a request, in frames of the protocol; to leave the loop ends the request."""
        number, request = next(self._numbers), _Request(submit.request, asyncio.Queue())
        self._requests[number] = request
        over = False
        try:
            self._line.send(replace(submit, request=number))
            while not over:
                news = await _all_of(request.news)
                over = isinstance(news[-1], (Summary, Refused))
                yield _frames(news)
                await asyncio.sleep(0 if over else _PAUSE)
        finally:
            del self._requests[number]
            if not over:
                self._line.send(Cancel(number))

    async def stats(self) -> StatsReply:
        """Return how the engine process is doing; if that ends, this may wait for ever."""
        number = next(self._numbers)
        answer: asyncio.Future[StatsReply] = self._loop.create_future()
        self._asked[number] = answer
        try:
            self._line.send(AskStats(number))
            return await answer
        finally:
            del self._asked[number]

    # ---- in the thread that reads the line

    def _take(self, messages: Iterable[FromEngine]) -> None:
        self._call(self._sort, list(messages))

    def _lose(self, error: EngineDeadError) -> None:
        self._call(self._end, error)

    def _call(self, function: Callable[..., object], argument: object) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, argument)

    # ---- in the event loop again

    def _sort(self, messages: Iterable[FromEngine]) -> None:
        for message in messages:
            match message:
                case StepUpdates(updates, summaries):
                    for update in updates:
                        self._pass_on(update)
                    for summary in summaries:
                        self._pass_on(summary)
                case Piece() | Refused():
                    self._pass_on(message)
                case StatsReply(number=number) if (asked := self._asked.get(number)) is not None and not asked.done():
                    asked.set_result(message)
                case Ready() if not self.ready.done():
                    self.ready.set_result(message)

    def _pass_on(self, news: News) -> None:
        if (request := self._requests.get(news.request)) is not None:  # none, if its client has left
            request.news.put_nowait(replace(news, request=request.number))

    def _end(self, error: EngineDeadError) -> None:
        for number in self._requests:
            self._pass_on(Refused(number, "unavailable", "the process that runs the model has ended"))
        self._lost(error)


async def _all_of(queue: asyncio.Queue[News]) -> list[News]:
    """Wait for one at least, and return all."""
    news = [await queue.get()]
    while not queue.empty():
        news.append(queue.get_nowait())
    return news


def _frames(news: Sequence[News]) -> bytes:
    """Return frames; a step comes last, since its summary is a request's last message."""
    updates = [entry for entry in news if isinstance(entry, Update)]
    summaries = [entry for entry in news if isinstance(entry, Summary)]
    others = [frame_of(entry) for entry in news if isinstance(entry, (Piece, Refused))]
    return b"".join([*others, frame_of(StepUpdates(updates, summaries))])
