"""What other clients send is answered, whole and as events.

`clients/` has the bodies that they have sent to a server that wrote them down: for a text, a stream, tools, an answer
to a call, a required call, and JSON. LangChain, LiteLLM, LlamaIndex and Vercel's AI SDK were installed for that.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.fronts import RunningFront
from support.scripted import Script

FILES = sorted((Path(__file__).parent / "clients").glob("*.json"))
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
SENT = [
    pytest.param(request["path"], request["body"], id=f"{client['client']}-{number}")
    for client in (json.loads(file.read_text()) for file in FILES)
    for number, request in enumerate(client["requests"])
]


def test_there_are_clients() -> None:
    assert len(FILES) == 4


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), SENT)
def test_what_a_client_sends_is_answered(
    speaking: tuple[Script, RunningFront], path: str, body: dict[str, Any], stream: bool
) -> None:
    script, front = speaking
    calls = bool(body.get("tools")) and body["messages"][-1]["role"] == "user"
    script.text = f"<think>Hm.</think>{CALL if calls else 'Sunny.'}"
    sent = {**body, "stream": stream}
    if not stream:
        sent.pop("stream_options", None)
    response = front.http.post(path, json=sent)
    assert response.status_code == 200, response.text
    if stream:
        assert response.text.endswith("data: [DONE]\n\n")
        assert "error" not in response.text
    assert ("tool_calls" in reasons(response.text)) == calls
    for message in body.get("messages", ()):
        assert all(text in script.prompt for text in texts(message))


def reasons(text: str) -> set[str]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith(("data: {", "{"))]
    return {choice["finish_reason"] for line in lines for choice in json.loads(line)["choices"]}


def texts(message: dict[str, Any]) -> list[str]:
    """What the model has to see of a message."""
    calls = [call["function"]["name"] for call in message.get("tool_calls") or ()]
    return [*calls, *(message[name] for name in ("content", "reasoning_content") if isinstance(message.get(name), str))]
