"""Requests that take long to begin: their forms and words are read beside the event loop, and others go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from compiled_llm.protocol.messages import Refused, Submit

if TYPE_CHECKING:  # imports torch
    from compiled_llm.server.engine_process.stream import Stream

_LONG = frozenset(("structured_outputs", "bad_words", "allowed_token_ids"))
"""Settings that are read for as long as their text is."""
_LONG_PROMPT = 2**14
"""Tokens of a prompt that are looked at for milliseconds."""


class Beginner(Protocol):
    """What begins requests."""

    def begin(self, submit: Submit) -> Stream | Refused:
        """Begin a request, in any thread."""
        ...


def takes_long(submit: Submit) -> bool:
    """Whether others would wait while a request begins."""
    return not _LONG.isdisjoint(submit.params) or len(submit.prompt) > _LONG_PROMPT


class Beginnings:
    """Those of one connection that are under way; its event loop alone uses them."""

    def __init__(self, desk: Beginner, begun: Callable[[Submit, Stream | Refused], None]) -> None:
        """Begin with none.

        Args:
            desk: begins requests.
            begun: is told, in the event loop, what has come of one.
        """
        self._desk = desk
        self._begun = begun
        self._tasks: dict[int, asyncio.Task[None]] = {}  # kept here: an event loop knows its tasks only weakly
        self._cancelled: dict[int, list[int | None]] = {}

    def __len__(self) -> int:
        """How many there are."""
        return len(self._tasks)

    def __contains__(self, request: int) -> bool:
        """Whether a request is beginning."""
        return request in self._tasks

    def begin(self, submit: Submit) -> None:
        """Begin a request beside the event loop."""
        self._cancelled[submit.request] = []
        self._tasks[submit.request] = asyncio.create_task(self._begin(submit))

    async def _begin(self, submit: Submit) -> None:
        begun = await asyncio.to_thread(self._desk.begin, submit)
        cancelled = self._cancelled.pop(submit.request)
        del self._tasks[submit.request]
        if not isinstance(begun, Refused):
            for index in cancelled:
                begun.handle.cancel(index)
        self._begun(submit, begun)

    def cancel(self, request: int, index: int | None = None) -> None:
        """End a request once it has begun, or the answer of one index."""
        self._cancelled[request].append(index)
