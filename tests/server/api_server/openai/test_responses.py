"""``/v1/responses`` for the openai package's client: text, items of tools and of thinking, whole and as it comes."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from openai.types.responses import ResponseFunctionToolCallOutputItem

from compiled_llm.engine.engine import Engine
from compiled_llm.requests.sampling_params import SamplingParams
from support.server.engine_processes import PATIENCE
from support.server.running_servers import RunningServer
from support.server.scripted import CALL, WEATHER as FUNCTION, Script

PLAIN = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "the quick fox"}]
INPUTS: list[Any] = [
    "the quick fox",
    [{"role": "user", "content": "the quick fox"}],
    [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "the quick fox"}]}],
]


@pytest.mark.parametrize("given", INPUTS, ids=["text", "message", "parts"])
def test_an_answer_is_the_engines(client: Any, engine: Engine, given: Any) -> None:
    (theirs,) = engine.generate([PLAIN], SamplingParams(temperature=0, max_tokens=20))  # type: ignore[list-item]
    options = {"model": "tiny", "input": given, "instructions": "Be brief.", "temperature": 0, "max_output_tokens": 20}
    ours = client.responses.create(**options, store=False, metadata={"a": "b"})
    assert ours.output_text == theirs.text
    assert ours.status == "incomplete"
    assert ours.incomplete_details.reason == "max_output_tokens"
    assert ours.metadata == {"a": "b"}
    assert (ours.usage.input_tokens, ours.usage.output_tokens) == (len(theirs.prompt_token_ids), 20)
    events = list(client.responses.create(**options, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:4]] == [
        *("response.created", "response.in_progress"),
        *("response.output_item.added", "response.content_part.added"),
    ]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == theirs.text
    last: Any = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == theirs.text


def test_log_probabilities_and_forms(client: Any) -> None:
    options: Any = {"model": "tiny", "input": "hi", "max_output_tokens": 200, "top_logprobs": 2}
    schema = {"enum": ["one", "two"]}
    form: Any = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    answer = client.responses.create(**options, include=["message.output_text.logprobs"], text=form)
    assert json.loads(answer.output_text) in ("one", "two")
    assert answer.status == "completed"
    part: Any = answer.output[0]
    logprobs = part.content[0].logprobs
    assert b"".join(bytes(entry.bytes) for entry in logprobs).decode() == answer.output_text
    assert all(len(entry.top_logprobs) == 2 for entry in logprobs)


# ---- tools and thinking


WEATHER: Any = {"type": "function", **FUNCTION["function"]}  # type: ignore[dict-item]
OPTIONS: dict[str, Any] = {"model": "tiny", "input": "How is the weather?", "tools": [WEATHER]}


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
def test_an_answer_has_its_items(talker: Any, script: Script, ask: Any, at_once: int) -> None:
    script.text, script.at_once = f"<think>Hm.</think>\n\nWell:\n{CALL}\n{CALL}", at_once
    response = ask(talker)
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
    thought, said, *calls = response.output
    assert (thought.content[0].text, said.content[0].text, response.output_text) == ("Hm.", "Well:", "Well:")
    assert {call.name for call in calls} == {"weather"}
    assert all(json.loads(call.arguments) == {"city": "Rome"} for call in calls)
    assert len({call.call_id for call in calls}) == 2
    assert {item.status for item in response.output} == {"completed"} == {response.status}
    assert response.usage.output_tokens_details.reasoning_tokens > 0
    assert response.tools[0].name == "weather"
    assert len(ask(talker, parallel_tool_calls=False).output) == 3


@pytest.mark.parametrize("ask", [whole, streamed])
def test_an_answer_that_was_cut(talker: Any, script: Script, ask: Any) -> None:
    script.text, script.reason = "<think>Hm", "length"
    response = whole(talker)
    assert [item.type for item in response.output] == ["reasoning"]
    assert (response.status, response.output[0].status) == ("incomplete", "incomplete")
    script.text = CALL[: CALL.index("ome")]
    response = whole(talker)
    (call,) = response.output
    (last,) = [event.response for event in whole(talker, stream=True) if event.type == "response.incomplete"]
    assert last.output[0].model_dump(exclude={"id", "call_id"}) == call.model_dump(exclude={"id", "call_id"})
    assert (response.status, call.status, call.arguments) == ("incomplete", "incomplete", '{"city": "R')
    script.text, script.reason = "", "stop"
    assert ask(talker).output_text == ""
    assert [item.type for item in ask(talker).output] == ["message"]


@pytest.mark.parametrize("by_alias", [False, True])
def test_items_go_back_with_fields_that_are_null(
    speaker: RunningServer, talker: Any, script: Script, by_alias: bool
) -> None:
    """As the openai package writes items that it has read, with all fields that it knows."""
    script.text = f"<think>Hm.</think>Well: {CALL}"
    items = [item.model_dump(by_alias=by_alias) for item in whole(talker).output]
    output = ResponseFunctionToolCallOutputItem.model_construct(
        type="function_call_output", call_id=items[-1]["call_id"], output="sun"
    )
    given = [{"role": "user", "content": "How?"}, *items, output.model_dump(by_alias=by_alias)]
    assert any(value is None for value in items[-1].values())
    script.text = "Fine."
    answer = speaker.http.post("/v1/responses", json={**OPTIONS, "input": given})
    assert answer.status_code == 200, answer.text
    for item, field, value in ((-2, "async", True), (-2, "namespace", "a"), (-1, "caller", {"type": "direct"})):
        wrong = [dict(entry) for entry in given]
        wrong[item][field] = value
        answer = speaker.http.post("/v1/responses", json={**OPTIONS, "input": wrong})
        assert (answer.status_code, field in answer.json()["error"]["param"]) == (400, True), answer.text


def test_a_chat_goes_on_after_a_call(talker: Any, script: Script) -> None:
    script.text = f"<think>Hm.</think>Well: {CALL}"
    first = whole(talker)
    script.text = "Fine."
    call = first.output[-1]
    given: list[Any] = [
        {"role": "user", "content": "How?"},
        *(item.model_dump(exclude_none=True) for item in first.output),
        {"type": "function_call_output", "call_id": call.call_id, "output": [{"type": "input_text", "text": "sun"}]},
    ]
    assert whole(talker, input=given, include=["reasoning.encrypted_content"]).output_text == "Fine."
    assert f"<think>Hm.</think>\nWell:\n{CALL}</s>" in script.prompt
    assert f"sun of weather by {call.call_id}" in script.prompt
    again = [*given, {"role": "assistant", "content": "Fine."}, {"role": "assistant", "content": "Yes."}]
    whole(talker, input=again)
    assert script.prompt.count("<|im_start|>assistant") == 4


def test_arguments_come_as_they_are_written(talker: Any, script: Script) -> None:
    begin = CALL.partition("ome")[0]
    script.text, script.at_once, script.allowed = f"{CALL}\n{CALL}", 1, threading.Semaphore()
    script.allowed.release(len(script.tokens(begin)) - 1)
    events, told = [], ""
    for event in whole(talker, stream=True, timeout=PATIENCE):
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


def test_calls_can_be_required(talker: Any, script: Script) -> None:
    script.text = CALL
    choice: Any = {"type": "function", "name": "weather"}
    for given in ("required", choice):
        response = whole(talker, tool_choice=given)
        assert response.output[0].type == "function_call"
        assert CALL.split('"')[1] in str(script.asked[-1].params["structured_outputs"])
        assert (response.tool_choice if given == "required" else response.tool_choice.model_dump()) == given
