"""Server-sent events: an answer as it comes."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

import msgspec
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from compiled_llm.server.front.answers import Answers
from compiled_llm.server.front.api_error import of_exception

logger = logging.getLogger("compiled_llm.server")

DONE = b"data: [DONE]\n\n"
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # proxies are to pass on what has come


def event_stream(groups: AsyncIterator[Iterable[bytes]], answers: Answers, end: bytes = DONE) -> StreamingResponse:
    """Return a response that sends events as they come.

    Args:
        groups: events, those together that came together.
        answers: where they come from; they end with the response.
        end: what is sent if all went well.
    """
    return StreamingResponse(_written(groups, answers, end), media_type="text/event-stream", headers=_HEADERS)


async def _written(groups: AsyncIterator[Iterable[bytes]], answers: Answers, end: bytes) -> AsyncIterator[bytes]:
    try:
        async for group in groups:
            if events := b"".join(group):
                yield events
        if end:
            yield end
    except Exception as error:  # the status was sent long ago
        told = of_exception(error)
        if told.status == 500:
            logger.exception("compiled_llm: a stream has failed")
        yield named_event("error", told.body)
    finally:
        answers.close()


def event(chunk: BaseModel) -> bytes:
    """Return what is set of a chunk, as an event."""
    return b"data: " + chunk.model_dump_json(exclude_unset=True).encode() + b"\n\n"


def named_event(name: str, data: Mapping[str, Any]) -> bytes:
    """Return data as an event that has a name."""
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(data) + b"\n\n"
