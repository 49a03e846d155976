"""Requests that take long to begin: a thread reads their grammars and words, and the event loop goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from compiled_llm.protocol.messages import Refused, Submit
from compiled_llm.server.daemon_threads import DaemonThreads, in_thread

if TYPE_CHECKING:  # imports torch
    from compiled_llm.server.engine_process.stream import Stream

_LONG = frozenset(("structured_outputs", "bad_words", "allowed_token_ids"))
"""Settings that are read for as long as their text is."""
_OF_PICTURES = DaemonThreads(4, "compiled_llm pictures")
"""So many requests with pictures begin at once: decoding takes memory, and others need threads meanwhile."""
_OTHERS = DaemonThreads(32, "compiled_llm beginnings")
_LONG_PROMPT = 2**14  # tokens of a prompt that are looked at for milliseconds


class Beginner(Protocol):
    """An engine process, as far as it begins requests."""

    def begin(self, submit: Submit) -> Stream | Refused:
        """Begin a request, in any thread."""
        ...


def takes_long(submit: Submit) -> bool:
    """Whether others would wait while a request begins."""
    of_settings = not _LONG.isdisjoint(submit.params)
    return of_settings or len(submit.prompt) > _LONG_PROMPT or submit.pictured is not None


class Beginnings:
    """A connection's requests that are about to begin; its event loop alone uses this, and hears of those that have."""

    def __init__(self, desk: Beginner, begun: Callable[[Submit, Stream | Refused], None]) -> None:
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
        threads = _OTHERS if submit.pictured is None else _OF_PICTURES
        begun = await in_thread(lambda: self._desk.begin(submit), threads)
        cancelled = self._cancelled.pop(submit.request)
        del self._tasks[submit.request]
        if not isinstance(begun, Refused):
            for index in cancelled:
                begun.handle.cancel(index)
        self._begun(submit, begun)

    def cancel(self, request: int, index: int | None = None) -> None:
        """End a request once it has begun, or the answer of one index."""
        self._cancelled[request].append(index)
