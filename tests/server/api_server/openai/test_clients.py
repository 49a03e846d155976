"""What other clients send is answered, whole and as events.

`clients/` has the bodies that they have sent to a server that wrote them down: for a text, a stream, tools, an answer
to a call, a required call, and JSON. LangChain, LiteLLM, LlamaIndex and Vercel's AI SDK were installed for that; the
first and the last speak to /v1/responses, too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.server.running_servers import RunningServer
from support.server.scripted import CALL, Script

FILES = sorted((Path(__file__).parent / "clients").glob("*.json"))
SENT = [
    pytest.param(request["path"], request["body"], id=f"{file.stem}-{number}")
    for file in FILES
    for number, request in enumerate(json.loads(file.read_text())["requests"])
]


def test_there_are_clients() -> None:
    assert len(FILES) == 6


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), SENT)
def test_what_a_client_sends_is_answered(
    script: Script, speaker: RunningServer, path: str, body: dict[str, Any], stream: bool
) -> None:
    messages = body.get("messages") or body.get("input") or []
    calls = bool(body.get("tools")) and messages[-1].get("role") == "user"
    script.text = f"<think>Hm.</think>{CALL if calls else 'Sunny.'}"
    sent = {**body, "stream": stream}
    if not stream:
        sent.pop("stream_options", None)
    response = speaker.http.post(path, json=sent)
    assert response.status_code == 200, response.text
    if stream:
        last = response.text.strip().rpartition("\n\n")[2]
        assert last == "data: [DONE]" or last.startswith("event: response.completed\n")
    assert (path == "/v1/completions") == ("<think>" in response.text)
    assert ('"tool_calls":[' in response.text or '"function_call"' in response.text) == calls
    assert all(text in script.prompt for message in messages for text in texts(message))


def texts(message: dict[str, Any]) -> list[str]:
    """What the model has to see of a message."""
    calls = [call["function"]["name"] for call in message.get("tool_calls") or ()]
    parts = message.get("content")
    content = [part["text"] for part in parts] if isinstance(parts, list) else [parts or ""]
    return [*calls, *content, *(message.get(name) or "" for name in ("name", "output", "reasoning_content"))]
