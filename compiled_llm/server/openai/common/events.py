"""Server-sent events: an answer as it comes."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any

import msgspec
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from compiled_llm.server.http.api_error import of_exception
from compiled_llm.server.openai.common.answers import Answers

logger = logging.getLogger("compiled_llm.server")

DONE = b"data: [DONE]\n\n"
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # proxies are to pass on what has come

_MARK = "\ue000\uf8ff\ue000"
"""A text that no model's name has: characters that nobody has given a meaning."""


class EventStream(Response):
    """Sends events as they come; it does not watch the client, which the answers do."""

    media_type = "text/event-stream"

    def __init__(self, groups: AsyncIterator[Iterable[bytes]], answers: Answers, end: bytes = DONE) -> None:
        """Send nothing yet.

        Args:
            groups: events, those together that came together.
            answers: where they come from; they end with the response.
            end: what is sent if all went well.
        """
        self.status_code = 200
        self.background = None
        self.init_headers(_HEADERS)
        self._groups = groups
        self._answers = answers
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all of them."""
        last, end = b"", self._end
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for group in self._groups:
                events = b"".join(group)
                if self._answers.finished:  # nothing is waited for any more: all that follows goes out together
                    last += events
                elif events:
                    await send({"type": "http.response.body", "body": events, "more_body": True})
        except Exception as error:  # the status was sent long ago
            end = _failed(error)
        finally:
            self._answers.close()
        await send({"type": "http.response.body", "body": last + end, "more_body": False})


def _failed(error: Exception) -> bytes:
    writer = of_exception(error)
    if writer.status == 500:
        logger.exception("compiled_llm: a stream has failed")
    return named_event("error", writer.body)


def event(chunk: BaseModel) -> bytes:
    """Return what is set of a chunk, as an event."""
    return b"data: " + chunk.model_dump_json(exclude_unset=True).encode() + b"\n\n"


class TextEvent:
    """Writes events that differ in a text alone, as almost all of an answer do: what they share is written once."""

    def __init__(self, written: Callable[[str], bytes]) -> None:
        """Look at how one is written.

        Args:
            written: writes an event with a text.
        """
        self._before, self._after = written(_MARK).split(msgspec.json.encode(_MARK))

    def __call__(self, text: str) -> bytes:
        """Return the event with a text."""
        return self._before + msgspec.json.encode(text) + self._after


def named_event(name: str, data: Mapping[str, Any]) -> bytes:
    """Return data as an event that has a name."""
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(data) + b"\n\n"
