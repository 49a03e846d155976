"""How a request is answered, whatever was asked: whole, or as events."""

from __future__ import annotations

from fastapi.responses import Response

from compiled_llm.server.http.worker_thread import written
from compiled_llm.server.openai.common.answers import Answers
from compiled_llm.server.openai.common.events import DONE, EventStream, ResponseWriter


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
