"""Server-sent events: an answer as it comes."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable

import msgspec
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from compiled_llm.server.front.answers import Answers
from compiled_llm.server.front.api_error import of_exception

logger = logging.getLogger("compiled_llm.server")

_DONE = b"data: [DONE]\n\n"
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # proxies are to pass on what has come


def event_stream(groups: AsyncIterator[Iterable[BaseModel]], answers: Answers) -> StreamingResponse:
    """Return a response that sends chunks as they come.

    Args:
        groups: chunks, those together that came together.
        answers: where they come from; they end with the response.
    """
    return StreamingResponse(_written(groups, answers), media_type="text/event-stream", headers=_HEADERS)


async def _written(groups: AsyncIterator[Iterable[BaseModel]], answers: Answers) -> AsyncIterator[bytes]:
    try:
        async for chunks in groups:
            if events := b"".join(map(_event, chunks)):
                yield events
        yield _DONE
    except Exception as error:  # the status was sent long ago
        told = of_exception(error)
        if told.status == 500:
            logger.exception("compiled_llm: a stream has failed")
        yield b"data: " + msgspec.json.encode(told.body) + b"\n\n"
    finally:
        answers.close()


def _event(chunk: BaseModel) -> bytes:
    return b"data: " + chunk.model_dump_json(exclude_unset=True).encode() + b"\n\n"
