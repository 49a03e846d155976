"""Requests that take long to begin: a thread reads their grammars and words, and the event loop goes on."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from compiled_llm.engine.apart.unwanted import UnwantedError
from compiled_llm.protocol.messages import Ended, Refused, StepUpdates, Submit, Summary, Update
from compiled_llm.server.daemon_threads import DaemonThreads, in_thread
from compiled_llm.server.http.memory import MEMORY

if TYPE_CHECKING:  # imports torch
    from compiled_llm.server.engine_process.stream import Stream

_LONG = frozenset(("structured_outputs", "bad_words", "allowed_token_ids"))
"""Settings that are read for as long as their text is."""
_OF_IMAGES = DaemonThreads(64, "compiled_llm images")
"""Threads of requests with images, which mostly wait for the turn of one of them; others need threads meanwhile."""
_OTHERS = DaemonThreads(32, "compiled_llm beginnings")
_LONG_PROMPT = 2**14  # tokens of a prompt that are looked at for milliseconds


class Beginner(Protocol):
    """An engine process, as far as it begins requests."""

    def begin(self, submit: Submit, wanted: Callable[[], bool]) -> Stream | Refused:
        """Begin a request, in any thread; UnwantedError if it takes long, and is not ``wanted`` any more."""
        ...


def takes_long(submit: Submit) -> bool:
    """Whether others would wait while a request begins."""
    of_settings = not _LONG.isdisjoint(submit.params)
    return of_settings or len(submit.prompt) > _LONG_PROMPT or submit.image_prompt is not None


def cancelled(submit: Submit) -> StepUpdates:
    """Return the end of a request that was cancelled before it began."""
    ended, count = Ended("cancelled"), submit.params.get("n", 1)
    updates = [Update(submit.request, index, [], None, ended) for index in range(count)]
    return StepUpdates(updates, [Summary(submit.request, 0, None, None, 0.0)])


class Beginnings:
    """A connection's requests that are about to begin; its event loop alone uses this, and hears of those that have."""

    def __init__(self, desk: Beginner, begun: Callable[[Submit, Stream | Refused | None], None]) -> None:
        """``begun`` hears of a request, and of None in its place if it was cancelled before it began."""
        self._desk = desk
        self._begun = begun
        self._tasks: dict[int, asyncio.Task[None]] = {}  # kept here: an event loop knows its tasks only weakly
        self._cancelled: dict[int, list[int | None]] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def __contains__(self, request: int) -> bool:
        return request in self._tasks

    def begin(self, submit: Submit) -> None:
        self._cancelled[submit.request] = []
        self._tasks[submit.request] = asyncio.create_task(self._begin(submit))

    async def _begin(self, submit: Submit) -> None:
        indices = self._cancelled[submit.request]
        threads = _OTHERS if submit.image_prompt is None else _OF_IMAGES
        wanted = functools.partial(_is_whole, indices)
        try:
            begun = await in_thread(lambda: self._desk.begin(submit, wanted), threads)
        except UnwantedError:
            begun = None
        finally:
            if submit.image_prompt is not None:
                MEMORY.give_back_soon()
        del self._cancelled[submit.request], self._tasks[submit.request]
        if begun is not None and not isinstance(begun, Refused):
            for index in indices:
                begun.handle.cancel(index)
        self._begun(submit, begun)

    def cancel(self, request: int, index: int | None = None) -> None:
        """End a request once it has begun, or the answer of one index."""
        self._cancelled[request].append(index)

    def cancel_all(self) -> None:
        """End all, since nobody waits for them any more."""
        for request in self._tasks:
            self.cancel(request)


def _is_whole(cancelled: Sequence[int | None]) -> bool:
    """Whether no more than some answers of a request were cancelled."""
    return None not in cancelled
