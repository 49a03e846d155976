"""How a request is answered, whatever was asked: whole, or as events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from fastapi.responses import Response
from pydantic import BaseModel

from compiled_llm.server.http.worker_thread import written
from compiled_llm.server.openai.common.answers import AnswerDelta, Answers
from compiled_llm.server.openai.common.events import DONE, EventStream, EventWriter


class ResponseWriter(EventWriter, Protocol):
    """A writer of answers in the form of an endpoint."""

    def begin(self) -> None:
        """Make ready for a stream, while its first token is waited for."""
        ...

    def whole(self, answers: Sequence[AnswerDelta]) -> BaseModel:
        """Return the response without events; many tokens take long."""
        ...


async def answered(writer: ResponseWriter, answers: Answers, stream: bool, end: bytes = DONE) -> Response:
    """Wait for answers, and return the response, whole or as events that end with ``end``; the answers end with it."""
    try:
        if stream:
            writer.begin()
            await answers.begun()
            return EventStream(writer, answers, end)
        found = await answers.ended()
        response = await written(lambda: writer.whole(found), answers.characters)
    except BaseException:
        answers.close()
        raise
    answers.close()
    return response
