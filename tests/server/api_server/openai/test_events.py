"""Events are written once and filled with text, as the models of the API would write them, and sent in few writes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from compiled_llm.server.http.api_error import ApiError
from compiled_llm.server.http.http_protocol import _HeadWithBody
from compiled_llm.server.openai.chat.response import ChatChunk, ChunkChoice, Delta
from compiled_llm.server.openai.common.events import EventStream, TextEvent, event
from compiled_llm.server.openai.completions.response import CompletionChoice, TextCompletion

HEAD: dict[str, Any] = {"id": "an-id", "created": 7, "model": 'a "model"', "usage": None}
NOTHING: dict[str, Any] = {"logprobs": None, "finish_reason": None}


def of_chat(text: str) -> bytes:
    choice = ChunkChoice(index=1, delta=Delta(content=text), **NOTHING)
    return event(ChatChunk(object="chat.completion.chunk", choices=[choice], **HEAD))


def of_completion(text: str) -> bytes:
    choice = CompletionChoice(index=1, text=text, **NOTHING)
    return event(TextCompletion(object="text_completion", choices=[choice], **HEAD))


TEXTS = [
    "",
    " a word",
    'quotes " and \\ and /',
    "\n\n\tdata: [DONE]\r\n",
    "漢字 🙂 \u2028 \ufffd",
    "\x00\x1f\x7f",
    "</script>",
]


@pytest.mark.parametrize("written", [of_chat, of_completion])
@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_written_as_its_model_would(written: Any, text: str) -> None:
    found = TextEvent(written)(text)
    assert found.startswith(b"data: ")
    assert found.endswith(b"\n\n")
    assert b"\n" not in found[:-2], "an event is one line"
    assert json.loads(found[6:]) == json.loads(written(text)[6:])


class Sent(asyncio.Transport):
    """What is written to a connection, one entry a write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.closed = False

    def write(self, data: Any) -> None:
        self.writes.append(bytes(data))

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True


def written(*does: str) -> tuple[list[bytes], bool]:
    """What comes of writes, ``""`` being a turn of the event loop, and whether the connection was closed."""
    sent = Sent()

    async def writing() -> None:
        transport = _HeadWithBody(sent, asyncio.get_running_loop())
        for data in does:
            if data == "close":
                transport.close()
            elif data:
                transport.write(data.encode())
            else:
                await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(writing())
    return sent.writes, sent.closed


def test_a_head_goes_out_with_the_beginning_of_its_body_or_soon() -> None:
    assert written("head", "first", "second") == ([b"headfirst", b"second"], False)
    assert written("head", "", "first", "second") == ([b"head", b"first", b"second"], False)
    assert written("head", "close") == ([b"head"], True)
    assert written("close") == ([], True)


class Ending:
    """Answers that end with the last but one of these events."""

    def __init__(self) -> None:
        self.finished = self.closed = False

    async def events(self, error: Exception | None = None) -> AsyncIterator[list[bytes]]:
        yield [b"one ", b"and "]
        yield []
        self.finished = True
        yield [b"two, "]
        if error is not None:
            raise error
        yield [b"and usage, "]

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("error", [None, ApiError(400, "a test")])
def test_all_that_follows_the_last_token_goes_out_together(error: Exception | None) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    answers: Any = Ending()
    stream = EventStream(answers.events(error), answers, b"end")
    asyncio.run(stream({"type": "http"}, cast(Any, None), send))
    last = b"two, and usage, end" if error is None else b'two, event: error\ndata: {"error":'
    start, first, end = sent
    assert (start["type"], first["body"], first["more_body"]) == ("http.response.start", b"one and ", True)
    assert end["body"].startswith(last)
    assert not end["more_body"]
    assert answers.closed
