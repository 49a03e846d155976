"""Server-sent events: an answer as it comes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from compiled_llm.server.http.api_error import of_exception
from compiled_llm.server.openai.common.answers import AnswerDelta, Answers

logger = logging.getLogger("compiled_llm.server")

DONE = b"data: [DONE]\n\n"
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # proxies are to pass events on at once

_MARK = "\ue000\uf8ff\ue000"  # a text that is part of no model's name: characters without a meaning in Unicode


class ResponseWriter(Protocol):
    """A writer of answers in the form of an endpoint."""

    def begin(self) -> None:
        """Make ready for a stream, while its first token is waited for."""
        ...

    def first_events(self) -> Iterable[bytes]:
        """Return what comes before all that is said of tokens."""
        ...

    def events(self) -> Iterable[bytes]:
        """Return what is new since the last call."""
        ...

    async def last_events(self) -> Iterable[bytes]:
        """Return what follows the last token."""
        ...

    def whole(self, answers: Sequence[AnswerDelta]) -> BaseModel:
        """Return the response without events; many tokens take long."""
        ...


class EventStream(Response):
    """A stream of events as they come, then ``end``; the answers, which watch the client, end with it."""

    media_type = "text/event-stream"

    def __init__(self, writer: ResponseWriter, answers: Answers, end: bytes = DONE) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(_HEADERS)
        self._writer = writer
        self._answers = answers
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answers, writer = self._answers, self._writer
        last = b"".join(writer.first_events())
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            with answers.listening() as wakeup:
                while not answers.have_ended():
                    if events := last + b"".join(writer.events()):
                        last = b""
                        await send({"type": "http.response.body", "body": events, "more_body": True})
                    await wakeup.wait()
                    wakeup.is_set = False
            last += b"".join(writer.events())  # nothing is waited for any more: all that follows goes out together
            last += b"".join([*await writer.last_events(), self._end])
        except (Exception, asyncio.CancelledError) as error:  # the status was sent long ago
            last += _failed(error)
        finally:
            answers.close()
        await send({"type": "http.response.body", "body": last, "more_body": False})


def _failed(error: BaseException) -> bytes:
    writer = of_exception(error)
    if writer.status == 500:
        logger.exception("compiled_llm: a stream has failed")
    return named_event("error", writer.body)


def event(chunk: BaseModel) -> bytes:
    """Return an event with the fields of a chunk that are set."""
    return b"data: " + chunk.model_dump_json(exclude_unset=True).encode() + b"\n\n"


def text_event(written: Callable[[str], bytes]) -> Callable[[str], bytes]:
    """Return what writes events that differ in a text alone, as most of an answer do: ``written`` is called once."""
    before, after = written(_MARK).split(msgspec.json.encode(_MARK))
    return lambda text: before + msgspec.json.encode(text) + after


def named_event(name: str, data: Mapping[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(data) + b"\n\n"
