"""Long work runs in another thread, so that the event loop serves other requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from fastapi.responses import Response
from pydantic import BaseModel

from compiled_llm.server.daemon_threads import in_thread
from compiled_llm.server.http.memory import MEMORY

T = TypeVar("T")

_LONG = 20_000
"""Characters from which on a text is tokenized in another thread: other requests would wait for milliseconds."""
_HUGE = 2**17  # characters from which on megabytes are left


async def in_thread_if_long(function: Callable[[], T], characters: int) -> T:
    """Return ``function()``; it runs in another thread if it takes many characters."""
    if characters < _LONG:
        return function()
    try:
        return await in_thread(function)
    finally:
        if characters >= _HUGE:
            MEMORY.give_back_soon()


async def written(made: Callable[[], BaseModel], characters: int) -> Response:
    """Return a response of about so many characters as JSON; a long one is made in another thread."""
    body = await in_thread_if_long(lambda: made().model_dump_json(), characters)
    return Response(body, media_type="application/json")
