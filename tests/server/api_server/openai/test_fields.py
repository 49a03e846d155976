"""Every field of OpenAI's requests is served, has no effect and says so, or is refused by name."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsStreaming as TextParams
from openai.types.responses.response_create_params import ResponseCreateParamsStreaming as ResponsesParams

from compiled_llm.server.openai.chat.request import ChatRequest, Message
from compiled_llm.server.openai.completions.request import CompletionRequest
from compiled_llm.server.openai.fields.fields import Body, NoEffect, RefusedField
from compiled_llm.server.openai.responses.request import ResponsesRequest
from support.docs.pages import DOCS
from support.server.running_servers import RunningServer

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "temperature": 0},
    TEXT: {"prompt": "hi", "max_tokens": 3, "temperature": 0},
    RESPONSES: {"input": "hi", "max_output_tokens": 3, "temperature": 0},
}
MODELS: dict[str, type[Body]] = {CHAT: ChatRequest, TEXT: CompletionRequest, RESPONSES: ResponsesRequest}
EXAMPLES: dict[str, Any] = {
    "user": "me",
    "metadata": {"a": "b"},
    "safety_identifier": "me",
    "prediction": {"type": "content", "content": "hi"},
    "prompt_cache_key": "me",
    "prompt_cache_options": {"a": 1},
    "prompt_cache_retention": "24h",
    "best_of": 1,
    "access_programs": {"a": "b"},
    "max_tool_calls": 3,
    "stream_options": {"include_obfuscation": False},
    "store": True,
    "verbosity": "low",
    "guided_decoding_backend": "xgrammar",
}
"""A value of each field that has no effect."""
TAKE_OBJECTS = (
    *("logit_bias", "chat_template_kwargs", "stream_options", "response_format", "text", "metadata"),
    *("structured_outputs", "reasoning"),
)
TAKE_BOTH = ("guided_json", "json_schema", "structural_tag")
"""Texts and objects."""


def fields(kind: type) -> list[tuple[str, str]]:
    """Each field with what it is marked as, with its path."""
    return [
        (path, name)
        for path, model in MODELS.items()
        for name, field in model.model_fields.items()
        if any(isinstance(mark, kind) for mark in field.metadata)
    ]


def send(api_server: RunningServer, path: str, **fields: Any) -> httpx.Response:
    return api_server.http.post(path, json={**BODIES[path], **fields})


def error(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 400, response.text
    found: dict[str, Any] = response.json()["error"]
    assert found["type"] == "invalid_request_error"
    return found


@pytest.mark.parametrize(
    ("params", "model"),
    [(ChatParams, ChatRequest), (TextParams, CompletionRequest), (ResponsesParams, ResponsesRequest)],
)
def test_every_field_of_openai_is_declared(params: Any, model: type[Body]) -> None:
    names = {name for base in params.__mro__ for name in getattr(base, "__annotations__", {})}
    names |= set(params.__annotations__)
    assert names <= set(model.model_fields)


@pytest.mark.parametrize(("path", "name"), fields(RefusedField))
def test_what_is_not_served_is_refused_by_name(api_server: RunningServer, path: str, name: str) -> None:
    found = error(send(api_server, path, **{name: "something"}))
    assert found["param"] == name
    assert found["message"].startswith(f"{name}: is not served: ")
    assert found["code"] == "unsupported_value"
    (mark,) = (mark for mark in MODELS[path].model_fields[name].metadata if isinstance(mark, RefusedField))
    for neutral in (None, *mark.neutral):
        assert send(api_server, path, **{name: neutral}).status_code == 200


def test_the_page_lists_what_has_no_effect_and_what_is_refused() -> None:
    page = (DOCS / "how-to" / "http.md").read_text().split("\n## ")
    (without,) = (part for part in page if part.startswith("Fields without effect"))
    (refused,) = (part for part in page if part.startswith("Fields that are refused"))
    for kind, part in ((NoEffect, without), (RefusedField, refused)):
        assert set(re.findall(r"^\| `(\w+)` \|", part, re.MULTILINE)) == {name for _, name in fields(kind)}
        for path, name in fields(kind):
            (mark,) = (mark for mark in MODELS[path].model_fields[name].metadata if isinstance(mark, kind))
            assert f"| {mark.why} |" in part
            for neutral in getattr(mark, "neutral", ()):
                assert re.search(rf"^\| `{name}` .*`{re.escape(json.dumps(neutral))}`", part, re.MULTILINE)


@pytest.mark.parametrize(("path", "name"), fields(NoEffect))
def test_what_has_no_effect_changes_nothing(api_server: RunningServer, path: str, name: str) -> None:
    streams = {"stream": True} if name == "stream_options" else {}
    plain, given = (send(api_server, path, **streams, **more) for more in ({}, {name: EXAMPLES[name]}))
    assert said(given) == said(plain)
    if name != "access_programs":  # of which nothing is known
        assert error(send(api_server, path, **{name: 1.5}))["param"] == name


def said(response: httpx.Response) -> list[str]:
    """What the answer says, whatever the kind of response, without ids and times."""
    assert response.status_code == 200
    return re.findall(r'"(?:content|text)":"[^"]*"', response.text)[-1:]  # of a stream, the whole text


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (path, name)
        for path, model in MODELS.items()
        for name, field in model.model_fields.items()
        if not any(isinstance(mark, (NoEffect, RefusedField)) for mark in field.metadata)
    ],
)
def test_what_is_served_is_checked_by_name(api_server: RunningServer, path: str, name: str) -> None:
    wrong = 1.5 if name in TAKE_BOTH else {1: 2} if name not in TAKE_OBJECTS else "x"
    assert (error(send(api_server, path, **{name: wrong}))["param"] or "").startswith(name)


@pytest.mark.parametrize("path", MODELS)
def test_what_nobody_knows_is_refused_by_name(api_server: RunningServer, path: str) -> None:
    found = error(send(api_server, path, colour="red"))
    assert (found["param"], found["code"]) == ("colour", "unknown_parameter")
    found = error(send(api_server, path, stream=True, stream_options={"colour": 1}))
    assert found["param"] == "stream_options.colour"


def test_fields_of_messages_are_refused_by_name(api_server: RunningServer) -> None:
    for name in ("audio", "tool_calls", "function_call", "refusal"):
        assert name in Message.model_fields
        found = error(send(api_server, CHAT, messages=[{"role": "user", "content": "hi", name: {"a": 1}}]))
        assert found["param"] == f"messages[0].{name}"
