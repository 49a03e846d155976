"""Events are written once and filled with text: as the models of the API would write them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from compiled_llm.server.front.chat_response import ChatChunk, ChunkChoice, Delta
from compiled_llm.server.front.completion_response import CompletionChoice, TextCompletion
from compiled_llm.server.front.events import TextEvent, event

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
