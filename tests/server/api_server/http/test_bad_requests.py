"""Whatever is sent, the answer is a sentence and a status, and the next request is answered."""

from __future__ import annotations

import importlib.util
import json
import re
import socket
from typing import Any

import pytest

from support.server.running_servers import HEAD, RunningServer

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HI = [{"role": "user", "content": "hi"}]

LONG_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["a" * 10_000] * 7}}}
FORM = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
TOOL = {"type": "function", "name": "x"}

WRONG: list[tuple[str, Any, str]] = [
    (CHAT, {}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": [{"role": "alien", "content": "hi"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"content": "hi"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0]"),
    (CHAT, {"messages": [*HI, {"role": "system", "content": "late"}]}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
    (CHAT, {"messages": HI, "top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"messages": HI, "temperature": -1}, "temperature"),
    (CHAT, {"messages": HI, "temperature": float("nan")}, "temperature"),
    (CHAT, {"messages": HI, "temperature": "0.5"}, "temperature"),
    (CHAT, {"messages": HI, "top_p": 0}, "top_p"),
    (CHAT, {"messages": HI, "n": 0}, "n"),
    (CHAT, {"messages": HI, "n": 17}, "n"),
    (CHAT, {"messages": HI, "n": 10**30}, "n"),
    (CHAT, {"messages": HI, "max_tokens": 0}, "max_tokens"),
    (CHAT, {"messages": HI, "max_tokens": 10**9}, "max_tokens"),
    (CHAT, {"messages": HI, "seed": 2**63}, "seed"),
    (CHAT, {"messages": HI, "stop": [""]}, "stop"),
    (CHAT, {"messages": HI, "logit_bias": {"x": 1}}, "logit_bias"),
    (CHAT, {"messages": HI, "logit_bias": {"1": 101}}, "logit_bias"),
    (CHAT, {"messages": HI, "logit_bias": {"99999": 1}}, "logit_bias"),
    (CHAT, {"messages": HI, "stream": False, "stream_options": {"include_usage": True}}, "stream_options"),
    (TEXT, {"prompt": "\ud800"}, "prompt"),
    (TEXT, {"prompt": "a", "stop": "\ud800"}, ""),
    (RESPONSES, {"input": "\ud800"}, "messages"),
    (RESPONSES, {"input": "a", "metadata": {"a": "\ud800"}}, "metadata"),
    (RESPONSES, {"input": "a", "text": {"format": {**FORM, "description": "\ud800"}}}, "text"),
    (RESPONSES, {"input": "a", "tool_choice": "none", "tools": [{**TOOL, "description": "\ud800"}]}, "tools"),
    (RESPONSES, {"input": "a", "tools": [{"type": "web_search"}]}, "tools[0]"),
    (RESPONSES, {"input": "a", "tools": [], "tool_choice": "required"}, "tool_choice"),
    (RESPONSES, {"input": [{"type": "function_call", "call_id": "a", "name": "b", "arguments": "c"}]}, "input[0].arg"),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].image_url"),
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": HI}, "prompt"),
    ("/detokenize", {"tokens": [-1]}, "tokens"),
    ("/detokenize", {"tokens": [99999]}, "tokens"),
    (CHAT, {"messages": HI, "response_format": {"type": "xml"}}, "response_format"),
    (CHAT, {"messages": HI, "response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_"),
    (CHAT, {"messages": HI, "min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    (CHAT, {"messages": HI, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
    (CHAT, {"messages": HI, "chat_template_kwargs": {"return_tensors": "pt"}}, "chat_template_kwargs"),
    (CHAT, {"messages": HI, "continue_final_message": True, "add_generation_prompt": True}, "messages"),
    (CHAT, {"messages": HI, "stop": ["a"] * 257}, "stop"),
    (CHAT, {"messages": HI, "stop": ["a" * 128] * 129}, "stop"),
    (CHAT, {"messages": HI, "bad_words": ["a" * 2**14, "b"]}, "bad_words"),
    (CHAT, {"messages": HI, "cache_salt": "a" * 1025}, "cache_salt"),
    (CHAT, {"messages": HI, "x" * 2000: 1}, "x" * 1000 + "…"),
    (CHAT, {"messages": [{"role": "user", "content": "a" * 2**16}]}, "messages"),
    (TEXT, {"prompt": "a" * 2**16}, "prompt"),
    (TEXT, {"prompt": [[1] * 1000] * 16, "echo": True, "logprobs": 20, "max_tokens": 1}, "logprobs"),
    (CHAT, {"messages": HI, "response_format": LONG_SCHEMA}, "response_format"),
    (CHAT, {"messages": HI, "max_tokens": 10**30}, "max_tokens"),
    (CHAT, {"messages": HI, "top_k": 10**30}, "top_k"),
    (CHAT, {"messages": HI, "logit_bias": {str(10**30): 1}}, "logit_bias"),
    (CHAT, {"messages": HI, "stop_token_ids": [10**30]}, "stop_token_ids"),
    (CHAT, {"messages": HI, "allowed_token_ids": [10**30]}, "allowed_token_ids"),
    (CHAT, {"messages": HI, "logprobs": True, "logprob_token_ids": [3, 3]}, "logprob_token_ids"),
    (CHAT, {"messages": HI, "logprobs": True, "logprob_token_ids": [10**30]}, "logprob_token_ids"),
    (CHAT, {"messages": HI, "logprobs": True, "logprob_token_ids": list(range(129))}, "logprob_token_ids"),
    (CHAT, {"messages": HI, "logprob_token_ids": [3]}, "logprob_token_ids"),
    (TEXT, {"prompt": "a", "logprob_token_ids": [3]}, "logprob_token_ids"),
    (CHAT, {"messages": HI, "repetition_penalty": 1e-300}, "repetition_penalty"),
    (RESPONSES, {"input": "a", "max_output_tokens": 10**30}, "max_"),
    (TEXT, {"prompt": []}, "prompt"),
    (TEXT, {"prompt": ""}, "prompt"),
    (TEXT, {"prompt": [[]]}, "prompt"),
    (TEXT, {"prompt": [-1]}, "prompt"),
    (TEXT, {"prompt": [10**30]}, "prompt"),
    (TEXT, {"prompt": "fox " * 3000}, "prompt"),
    (TEXT, {"prompt": ["a"] * 9, "n": 2}, "n"),
    (TEXT, {"prompt": "a", "best_of": 3}, "best_of"),
    (TEXT, [], ""),
    (TEXT, "text", ""),
]


@pytest.mark.parametrize(("path", "body", "param"), WRONG, ids=lambda value: str(value)[:60])
def test_what_is_impossible_is_refused_by_name(api_server: RunningServer, path: str, body: Any, param: str) -> None:
    response = api_server.http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    found = response.json()["error"]
    assert found["message"]
    assert (found["param"] or "").startswith(param)
    assert not re.search(r"Traceback|\.py\b|/(tmp|root|home|usr)/", response.text)
    assert_answers(api_server)


def assert_answers(api_server: RunningServer) -> None:
    assert api_server.http.post(TEXT, json={"prompt": "a", "max_tokens": 1}).status_code == 200


def test_streams_models_and_paths_that_there_are_not_have_a_status(api_server: RunningServer) -> None:
    for body in ({"max_tokens": 10**9}, {"logit_bias": {"99999": 1}}):
        assert api_server.http.post(TEXT, json={"prompt": "a", "stream": True, **body}).status_code == 400
    response = api_server.http.post(TEXT, json={"prompt": "a", "model": "gpt-9"})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    assert api_server.http.get("/v1/nothing").json()["error"]["type"] == "not_found_error"
    assert api_server.http.get(TEXT).status_code == 405


@pytest.mark.parametrize(
    ("content", "status"),
    [(b"", 400), (b"{", 400), (b"\xff\xfe", 400), (b"[" * 20_000, 400), (b'{"prompt": "' + b"a" * 2**17 + b'"}', 413)],
    ids=["empty", "half", "no utf-8", "deep", "long"],
)
def test_bodies_that_are_no_json_or_too_long(api_server: RunningServer, content: bytes, status: int) -> None:
    headers = {"content-type": "application/json"}
    response = api_server.http.post(TEXT, content=content, headers=headers)
    assert (response.status_code, response.json()["error"]["param"]) == (status, None)

    def pieces() -> Any:
        yield content

    assert api_server.http.post(TEXT, content=pieces(), headers=headers).status_code == status
    assert_answers(api_server)


@pytest.mark.parametrize("levels", [700, 950, 10_000])
@pytest.mark.parametrize("field", ["chat_template_kwargs", "metadata"])
def test_a_body_of_many_levels_is_no_error_of_the_server(api_server: RunningServer, field: str, levels: int) -> None:
    nested = '{"a":' * levels + "1" + "}" * levels
    content = f'{{"messages": {json.dumps(HI)}, "max_tokens": 1, "{field}": {nested}}}'
    response = api_server.http.post(CHAT, content=content, headers={"content-type": "application/json"})
    assert response.status_code in (200, 400), response.text  # how many are too many differs between Pythons
    assert_answers(api_server)


def test_other_kinds_of_bodies(api_server: RunningServer) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        response = api_server.http.post(TEXT, content=b'{"prompt": "a"}', headers={"content-type": kind})
        assert response.status_code == 415
        assert response.json()["error"]["message"] == "Content-Type: the body has to be application/json"
    headers = {"content-type": "application/json; charset=utf-8"}
    assert api_server.http.post(TEXT, content=b'{"prompt": "a"}', headers=headers).status_code == 200


@pytest.mark.parametrize(
    "sent", [HEAD + b"Content-Length: 99\r\n\r\n{", HEAD, b"\x00\x01\x02\r\n\r\n", HEAD + b"Content-Length: -1\r\n\r\n"]
)
def test_half_requests(api_server: RunningServer, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", api_server.port)) as peer:
        peer.sendall(sent)
    assert_answers(api_server)


def test_without_xgrammar_a_form_is_refused(api_server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "xgrammar" else find(name))
    response = api_server.http.post(CHAT, json={"messages": HI, "response_format": {"type": "json_object"}})
    assert response.status_code == 400
    assert "pip install '.[structured]'" in response.json()["error"]["message"]
    assert api_server.http.post(CHAT, json={"messages": HI, "max_tokens": 2}).status_code == 200
