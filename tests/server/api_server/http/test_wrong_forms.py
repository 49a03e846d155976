"""A form that cannot be is its client's mistake, and is told by the field that the client has sent, however late."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

import compiled_llm
from compiled_llm.engine.engine import Engine
from support.server.engine_processes import engine_that_names_its_tokenizer
from support.server.running_servers import RunningServer, running_server
from support.server.scripted import tool_tokenizer
from support.tiny_models import tiny_qwen3

pytest.importorskip("xgrammar")

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HI = [{"role": "user", "content": "hi"}]
ASKED: dict[str, Any] = {CHAT: {"messages": HI}, TEXT: {"prompt": "hi"}, RESPONSES: {"input": "hi"}}

RECURSIVE = {  # references that only lead to themselves
    "itself": {"$ref": "#"},
    "each other": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
}
WRONG = {
    "is none": {"type": "string", "pattern": "a(b"},
    "is malformed": {"allOf": 5},
    "leads nowhere": {"$ref": "#/a"},
    "no float": {"type": "integer", "minimum": 10**309},
    "has no such length": {"type": "string", "maxLength": 10**309},
    "external": {"$ref": "https://example.com/schema.json"},
    "too deep": {"type": "string", "pattern": "(" * 1001 + "a" + ")" * 1001},
    **RECURSIVE,
}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    model = compiled_llm.wrap(tiny_qwen3(eos_token_id=1, num_hidden_layers=1, vocab_size=380), mode="eager")
    with Engine(model, tokenizer=tool_tokenizer()) as engine:
        yield engine


@pytest.fixture(scope="module")
def api_server(engine: Engine) -> Iterator[RunningServer]:
    with engine_that_names_its_tokenizer(engine) as loop, running_server(loop.server._path) as api_server:
        yield api_server


@pytest.fixture
def nothing_compiles(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Grammars are not compiled in time, in none."""
    over = threading.Event()

    def compile(*_: Any) -> Any:
        over.wait()
        raise RuntimeError("it took too long")

    monkeypatch.setattr(engine._grammars, "_timeout", 0.05)
    monkeypatch.setattr(engine._grammars._compilers, "compile", compile)
    yield
    over.set()


def formats(schema: Any) -> list[tuple[str, dict[str, Any], str]]:
    """Each field by which a client can send a schema, and its name in errors."""
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    function = {"name": "f", "parameters": schema}
    tools, strict = ([{"type": "function", "function": function | extra}] for extra in ({}, {"strict": True}))
    flat = {"type": "json_schema", "name": "x", "schema": schema}
    return [
        (CHAT, {"response_format": named}, "response_format"),
        (TEXT, {"response_format": named}, "response_format"),
        (CHAT, {"guided_json": schema}, "guided_json"),
        (TEXT, {"json_schema": schema}, "json_schema"),
        (TEXT, {"structured_outputs": {"json": schema}}, "structured_outputs"),
        (CHAT, {"tools": tools, "tool_choice": "required"}, "tools"),
        (CHAT, {"tools": strict}, "tools"),
        (CHAT, {"tools": tools, "response_format": named}, "response_format or tools"),
        (CHAT, {"response_format": named, "chat_template_kwargs": {"think": True}}, "response_format"),
        (RESPONSES, {"text": {"format": flat}}, "text.format"),
    ]


def assert_is_clients(answer: httpx.Response, field: str, sent: Any) -> None:
    assert answer.status_code == 400, answer.text[:1000]
    assert "Retry-After" not in answer.headers
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    named = str(error["message"]).split(":")[0]
    assert named in (field, field.split(" or ")[0])  # one is wrong by itself, which is told first
    assert error["param"] == (None if " or " in named else named)
    if "structured_outputs" not in sent:
        assert not re.search("structured_?outputs", error["message"], re.IGNORECASE)


def assert_answers(api_server: RunningServer) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes"]}}}
    answer = api_server.post(CHAT, messages=HI, max_tokens=20, response_format=form)
    assert json.loads(answer["choices"][0]["message"]["content"]) == "yes"


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("kind", WRONG)
def test_errors_name_the_field_that_was_sent(api_server: RunningServer, kind: str, streams: bool) -> None:
    for path, sent, field in formats(WRONG[kind]):
        if kind in RECURSIVE and {"tools", "chat_template_kwargs"} & sent.keys():
            continue  # inside of a larger form they are fine
        answer = api_server.http.post(path, json={**ASKED[path], **sent, "stream": streams})
        assert_is_clients(answer, field, sent)
    assert_answers(api_server)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("field", ["guided_grammar", "ebnf", "guided_regex", "regex", "structural_tag"])
def test_so_do_those_of_grammars_and_patterns(api_server: RunningServer, field: str, streams: bool) -> None:
    form: Any = {"type": "structural_tag", "format": {"type": "colour"}} if field == "structural_tag" else "root ::= (("
    for path in (CHAT, TEXT):
        answer = api_server.http.post(path, json={**ASKED[path], field: form, "stream": streams})
        assert_is_clients(answer, field, {field})


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.usefixtures("nothing_compiles")
def test_a_grammar_that_is_not_compiled_in_time(api_server: RunningServer, streams: bool) -> None:
    for path, sent, field in formats({"enum": [f"slow{streams}"]}):
        answer = api_server.http.post(path, json={**ASKED[path], **sent, "stream": streams})
        assert_is_clients(answer, field, sent)
        assert "was not compiled within" in answer.json()["error"]["message"]


def test_openais_client_does_not_ask_again(api_server: RunningServer) -> None:
    asked: list[httpx.Request] = []
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": WRONG["is none"]}}
    said: Any = {"model": "tiny", "messages": HI, "response_format": form}
    with (
        httpx.Client(event_hooks={"request": [asked.append]}) as http,
        openai.OpenAI(base_url=f"{api_server.url}/v1", api_key="none", http_client=http) as client,
        pytest.raises(openai.BadRequestError, match="response_format: "),
    ):
        client.chat.completions.create(**said)
    assert len(asked) == 1


@pytest.mark.whole
def test_a_form_that_no_token_goes_on_with_ends_a_stream_by_name(api_server: RunningServer) -> None:
    (letter,) = tool_tokenizer()("a", add_special_tokens=False)["input_ids"]
    body = {"prompt": "hi", "stream": True, "max_tokens": 400, "allowed_token_ids": [letter]}
    # The first of 300 letters begins the answer long before the last: one that fails before it begins is a 400.
    answer = api_server.http.post(TEXT, json={**body, "guided_regex": "a{300}b"})
    assert answer.status_code == 200, answer.text
    *_, last = answer.text.strip().split("\n\n")
    name, data = last.split("\n")
    error = json.loads(data.removeprefix("data: "))["error"]
    assert name == "event: error"
    assert error["message"].startswith("guided_regex: no token is left")
    assert (error["type"], error["param"]) == ("invalid_request_error", "guided_regex")
