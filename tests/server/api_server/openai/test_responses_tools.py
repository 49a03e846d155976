"""``/v1/responses`` with tools and thinking: items one by one, whole and as events, for the openai package's client."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from support.server.engine_processes import PATIENCE
from support.server.running_servers import RunningServer
from support.server.scripted import CALL, WEATHER as FUNCTION, Script

WEATHER: Any = {"type": "function", **FUNCTION["function"]}  # type: ignore[dict-item]
OPTIONS: dict[str, Any] = {"model": "tiny", "input": "How is the weather?", "tools": [WEATHER]}


@pytest.fixture(scope="module")
def api_server(speaking: tuple[Script, RunningServer]) -> RunningServer:
    """The one that ``client`` talks to."""
    return speaking[1]


def whole(client: Any, **options: Any) -> Any:
    return client.responses.create(**{**OPTIONS, **options})


def streamed(client: Any, **options: Any) -> Any:
    """What the client's own accumulator makes of a stream; the items that it was told of are those of the end."""
    with client.responses.stream(**{**OPTIONS, **options}) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    done = [event.item for event in events if event.type == "response.output_item.done"]
    added = [event.item for event in events if event.type == "response.output_item.added"]
    assert [item.id for item in done] == [item.id for item in added] == [item.id for item in final.output]
    thought = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
    assert thought == "".join(part.text for item in done if item.type == "reasoning" for part in item.content or ())
    assert [item.model_dump() for item in done if item.type == "reasoning"] == [
        item.model_dump() for item in final.output if item.type == "reasoning"
    ]
    return final


@pytest.mark.parametrize("at_once", [1, 1000])
@pytest.mark.parametrize("ask", [whole, streamed])
def test_an_answer_has_its_items(client: Any, script: Script, ask: Any, at_once: int) -> None:
    script.text, script.at_once = f"<think>Hm.</think>\n\nWell:\n{CALL}\n{CALL}", at_once
    response = ask(client)
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
    thought, said, *calls = response.output
    assert (thought.content[0].text, said.content[0].text, response.output_text) == ("Hm.", "Well:", "Well:")
    assert {call.name for call in calls} == {"weather"}
    assert all(json.loads(call.arguments) == {"city": "Rome"} for call in calls)
    assert len({call.call_id for call in calls}) == 2
    assert {item.status for item in response.output} == {"completed"} == {response.status}
    assert response.usage.output_tokens_details.reasoning_tokens > 0
    assert response.tools[0].name == "weather"
    assert len(ask(client, parallel_tool_calls=False).output) == 3


@pytest.mark.parametrize("ask", [whole, streamed])
def test_an_answer_that_was_cut(client: Any, script: Script, ask: Any) -> None:
    script.text, script.reason = "<think>Hm", "length"
    response = whole(client)
    assert [item.type for item in response.output] == ["reasoning"]
    assert (response.status, response.output[0].status) == ("incomplete", "incomplete")
    script.text = CALL[: CALL.index("ome")]
    response = whole(client)
    (call,) = response.output
    (last,) = [event.response for event in whole(client, stream=True) if event.type == "response.incomplete"]
    assert last.output[0].model_dump(exclude={"id", "call_id"}) == call.model_dump(exclude={"id", "call_id"})
    assert (response.status, call.status, call.arguments) == ("incomplete", "incomplete", '{"city": "R')
    script.text, script.reason = "", "stop"
    assert ask(client).output_text == ""
    assert [item.type for item in ask(client).output] == ["message"]


def test_a_chat_goes_on_after_a_call(client: Any, script: Script) -> None:
    script.text = f"<think>Hm.</think>Well: {CALL}"
    first = whole(client)
    script.text = "Fine."
    call = first.output[-1]
    given: list[Any] = [
        {"role": "user", "content": "How?"},
        *(item.model_dump(exclude_none=True) for item in first.output),
        {"type": "function_call_output", "call_id": call.call_id, "output": [{"type": "input_text", "text": "sun"}]},
    ]
    assert whole(client, input=given, include=["reasoning.encrypted_content"]).output_text == "Fine."
    assert f"<think>Hm.</think>\nWell:\n{CALL}</s>" in script.prompt
    assert f"sun of weather by {call.call_id}" in script.prompt
    again = [*given, {"role": "assistant", "content": "Fine."}, {"role": "assistant", "content": "Yes."}]
    whole(client, input=again)
    assert script.prompt.count("<|im_start|>assistant") == 4


def test_arguments_come_as_they_are_written(client: Any, script: Script) -> None:
    begin = CALL.partition("ome")[0]
    script.text, script.at_once, script.allowed = f"{CALL}\n{CALL}", 1, threading.Semaphore()
    script.allowed.release(len(script.tokens(begin)) - 1)
    events, told = [], ""
    for event in whole(client, stream=True, timeout=PATIENCE):
        events.append(event)
        if event.type == "response.function_call_arguments.delta":
            told += event.delta
        if told == '{"city": "R':
            told = ""
            script.allowed.release(len(script.text))
    assert told == 'ome"}{"city": "Rome"}'
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [(event.output_index, event.arguments) for event in done] == [
        (0, '{"city": "Rome"}'),
        (1, '{"city": "Rome"}'),
    ]


def test_calls_can_be_required(client: Any, script: Script) -> None:
    script.text = CALL
    choice: Any = {"type": "function", "name": "weather"}
    for given in ("required", choice):
        response = whole(client, tool_choice=given)
        assert response.output[0].type == "function_call"
        assert CALL.split('"')[1] in str(script.asked[-1].params["structured_outputs"])
        assert (response.tool_choice if given == "required" else response.tool_choice.model_dump()) == given
