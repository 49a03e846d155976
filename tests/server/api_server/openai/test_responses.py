"""``/v1/responses`` for the openai package's client: the engine's text, whole and as it comes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from compiled_llm.engine.engine import Engine
from compiled_llm.requests.sampling_params import SamplingParams

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


def test_a_chat_goes_on_with_what_was_answered(client: Any) -> None:
    first = client.responses.create(model="tiny", input="hi", temperature=0, max_output_tokens=8)
    said: list[Any] = [{"role": "user", "content": "hi"}, *(item.model_dump() for item in first.output)]
    again = client.responses.create(model="tiny", input=[*said, {"role": "user", "content": "go on"}])
    assert again.usage.input_tokens > first.usage.input_tokens + 8


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
