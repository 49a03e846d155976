"""How a request is answered, whatever was asked: whole, or as events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Protocol

from fastapi.responses import Response
from pydantic import BaseModel

from compiled_llm.requests.outputs import Completion
from compiled_llm.server.http.worker_thread import written
from compiled_llm.server.openai.common.answers import Answers
from compiled_llm.server.openai.common.events import DONE, EventStream


class ResponseWriter(Protocol):
    """A writer of answers in the form of an endpoint."""

    def stream(self) -> AsyncIterator[Iterable[bytes]]:
        """Make ready, then yield groups of events, those together that came together."""
        ...

    def whole(self, completions: Sequence[Completion]) -> BaseModel:
        """Return the response without events; many tokens take long."""
        ...


async def answered(writer: ResponseWriter, answers: Answers, stream: bool, end: bytes = DONE) -> Response:
    """Wait for answers, and return the response, whole or as events that end with ``end``; the answers end with it."""
    try:
        if stream:
            events = EventStream(writer.stream(), answers, end)  # made ready before there is a token to be sent
            await answers.begun()
            return events
        completions = await answers.ended()
        response = await written(lambda: writer.whole(completions), answers.characters)
    except BaseException:
        answers.close()
        raise
    answers.close()
    return response
