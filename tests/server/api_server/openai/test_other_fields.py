"""Fields that vLLM and SGLang have besides OpenAI's, through the openai client and as they are sent."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from compiled_llm.engine.engine import Engine
from support.server.accepting import takes
from support.server.running_servers import RunningServer, chat_tokenizer
from support.server.scripted import Script

TEXT, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
HI: Any = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    TEXT: {"prompt": "the fox", "max_tokens": 12, "seed": 3},
    CHAT: {"messages": HI, "max_tokens": 12, "seed": 3},
    RESPONSES: {"input": "hi", "max_output_tokens": 12, "seed": 3},
}
NUMBER = {"type": "integer", "minimum": 10, "maximum": 99}
FORMS: dict[str, Any] = {
    "structured_outputs": {"json": NUMBER},
    "guided_json": json.dumps(NUMBER),
    "guided_regex": "[1-9][0-9]",
    "guided_choice": ["11", "22"],
    "guided_grammar": "root ::= [1-9] [0-9]",
    "structural_tag": {"type": "structural_tag", "format": {"type": "regex", "pattern": "[1-9][0-9]"}},
    "json_schema": NUMBER,
    "regex": "[1-9][0-9]",
    "ebnf": "root ::= [1-9] [0-9]",
}


def post(api_server: RunningServer, path: str, **fields: Any) -> Any:
    response = api_server.http.post(path, json={**BODIES[path], **fields})
    assert response.status_code == 200, response.text
    return response.json()


def refusal(api_server: RunningServer, path: str, **fields: Any) -> dict[str, Any]:
    response = api_server.http.post(path, json={**BODIES[path], **fields})
    assert response.status_code == 400, response.text
    found: dict[str, Any] = response.json()["error"]
    return found


def events(api_server: RunningServer, path: str, **fields: Any) -> list[dict[str, Any]]:
    return list(api_server.events(path, **{**BODIES[path], **fields}))


def text_of(path: str, body: dict[str, Any]) -> str:
    if path == RESPONSES:
        return "".join(part["text"] for item in body["output"] for part in item["content"])
    (choice,) = body["choices"]
    return str(choice["text"] if path == TEXT else choice["message"]["content"])


# ---- forms


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", FORMS)
def test_forms_by_all_their_names(api_server: RunningServer, path: str, name: str) -> None:
    text = text_of(path, post(api_server, path, **{name: FORMS[name]}))
    assert 10 <= int(text) <= 99


@pytest.mark.parametrize("name", ["regex", "choice", "grammar", "json_object", "structural_tag"])
def test_forms_in_structured_outputs(client: openai.OpenAI, name: str) -> None:
    form = {"json_object": True, "choice": ["11", "22"], "regex": "[1-9][0-9]"} | {
        "grammar": FORMS["ebnf"],
        "structural_tag": json.dumps(FORMS["structural_tag"]),
    }
    likes = {str(chat_tokenizer().encode("}")[0]): 20.0}
    answer = client.chat.completions.create(
        model="tiny",
        messages=HI,
        max_tokens=90,
        logit_bias=likes,  # type: ignore[arg-type]
        extra_body={"structured_outputs": {name: form[name]}},
    )
    json.loads(answer.choices[0].message.content or "")


def test_white_space_is_said_beside_a_response_format(speaking: tuple[Script, RunningServer]) -> None:
    script, api_server = speaking
    wanted = {"response_format": {"type": "json_object"}}
    for said, params in (
        ({"disable_any_whitespace": True}, {"json_object": True, "disable_any_whitespace": True}),
        ({"max_whitespace_cnt": 3}, {"json_object": True, "max_whitespace_cnt": 3}),
        ({"max_whitespace_cnt": None}, {"json_object": True, "max_whitespace_cnt": None}),
        ({}, {"json_object": True}),
    ):
        post(api_server, CHAT, **wanted, structured_outputs=said)
        assert script.asked[-1].params["structured_outputs"] == params
    post(api_server, CHAT, structured_outputs={})
    assert "structured_outputs" not in script.asked[-1].params


def test_tags_as_a_response_format(speaking: tuple[Script, RunningServer]) -> None:
    script, api_server = speaking
    for given in ({"format": {"type": "any_text"}}, {"structures": [], "triggers": ["<a>"]}):
        tag = {"type": "structural_tag", **given}
        post(api_server, CHAT, response_format=tag)
        assert json.loads(script.asked[-1].params["structured_outputs"]["structural_tag"]) == tag


@pytest.mark.parametrize("path", BODIES)
def test_forms_that_are_at_odds_are_refused_by_name(api_server: RunningServer, path: str) -> None:
    for given, param in (
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "ebnf": 'root ::= "a"'}, "structured_outputs"),
        ({"guided_json": {"multipleOf": 3}}, "guided_json"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"structured_outputs": {"colour": 1}}, "structured_outputs.colour"),
        ({"structured_outputs": {"max_whitespace_cnt": 0}}, "structured_outputs.max_whitespace_cnt"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"json_schema": {"enum": ["a" * 2**16]}}, "json_schema"),
    ):
        assert refusal(api_server, path, **given)["param"] == param, given
    if path == CHAT:
        found = refusal(api_server, path, response_format={"type": "json_object"}, guided_regex="a")
        assert found["message"] == (
            "guided_regex: an answer has one form, and there are several, in guided_regex, response_format"
        )


@pytest.mark.parametrize("name", FORMS)
def test_forms_come_after_thinking(speaking: tuple[Script, RunningServer], name: str) -> None:
    script, api_server = speaking
    post(api_server, CHAT, **{name: FORMS[name]}, chat_template_kwargs={"think": True})
    form = json.loads(script.asked[-1].params["structured_outputs"]["structural_tag"])["format"]
    assert takes(form, "Hm.</think>\n\n22")
    assert not takes(form, "22")
    assert not takes(form, "Hm.</think>\n\n222")


def test_forms_that_cannot_come_after_thinking_are_refused(speaking: tuple[Script, RunningServer]) -> None:
    _, api_server = speaking
    thinks = {"chat_template_kwargs": {"think": True}}
    for given in (
        {"guided_grammar": 'start: "a"'},
        {"structural_tag": {"structures": [{"begin": "a", "schema": {}, "end": "b"}], "triggers": ["a"]}},
        {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
    ):
        found = refusal(api_server, CHAT, **given, **thinks)
        assert (found["param"], found["code"]) == (next(iter(given)), "unsupported_value")
        post(api_server, CHAT, **given)


# ---- the order in which requests run, and their prompts


@pytest.mark.parametrize("path", BODIES)
def test_a_priority_and_a_salt_reach_the_engine(speaking: tuple[Script, RunningServer], path: str) -> None:
    script, api_server = speaking
    for given in (None, -3, 7):
        post(api_server, path, priority=given, cache_salt="mine")
        assert (script.asked[-1].priority, script.asked[-1].cache_salt) == (given or 0, "mine")
    assert refusal(api_server, path, priority=2**31)["param"] == "priority"


@pytest.mark.parametrize("path", BODIES)
def test_a_prompt_is_cut_at_its_beginning(speaking: tuple[Script, RunningServer], path: str) -> None:
    script, api_server = speaking
    post(api_server, path)
    whole = script.asked[-1].prompt
    for most in (1, 3, len(whole), 1000, -1):
        post(api_server, path, truncate_prompt_tokens=most)
        assert script.asked[-1].prompt == (whole if most == -1 else whole[-most:])
    post(api_server, path, truncate_prompt_tokens=3, truncation_side="right")
    assert script.asked[-1].prompt == whole[:3]
    assert refusal(api_server, path, truncate_prompt_tokens=0)["param"] == "truncate_prompt_tokens"
    longer = {TEXT: {"prompt": "a " * 9000}, RESPONSES: {"input": "a " * 9000}}.get(
        path, {"messages": [{"role": "user", "content": "a " * 9000}]}
    )
    assert refusal(api_server, path, **longer)["code"] == "context_length_exceeded"
    post(api_server, path, truncate_prompt_tokens=-1, **longer)
    assert len(script.asked[-1].prompt) == 4000 - 12


@pytest.mark.parametrize("path", BODIES)
def test_a_text_that_surely_does_not_fit_is_refused_though_it_would_be_cut(
    speaking: tuple[Script, RunningServer], path: str
) -> None:
    _, api_server = speaking
    text = "a b " * 30_000
    body = {TEXT: {"prompt": text}, RESPONSES: {"input": text}}.get(
        path, {"messages": [{"role": "user", "content": text}]}
    )
    refused = refusal(api_server, path, truncate_prompt_tokens=-1, **body)
    assert refused["code"] == "context_length_exceeded"
    assert "truncate_prompt_tokens cuts tokens" in refused["message"]
    assert "chat template" not in refused["message"]


def test_effort_goes_to_the_template(speaking: tuple[Script, RunningServer]) -> None:
    script, api_server = speaking
    tokenizer: Any = api_server.api_server.link.model.vocabulary.tokenizer
    before = tokenizer.chat_template
    tokenizer.chat_template = "{{ reasoning_effort }} {{ enable_thinking }} {{ colour }}" + before
    try:
        for effort, said in (("low", "low  "), ("none", "none False "), (None, "  ")):
            post(api_server, CHAT, reasoning_effort=effort)
            assert script.prompt.startswith(said)
            post(api_server, RESPONSES, reasoning={"effort": effort, "summary": "auto"})
            assert script.prompt.startswith(said)
        post(api_server, CHAT, reasoning_effort="none", chat_template_kwargs={"enable_thinking": True})
        assert script.prompt.startswith("none True ")
        post(api_server, RESPONSES, chat_template_kwargs={"colour": "red"})
        assert script.prompt.startswith("  red")
    finally:
        tokenizer.chat_template = before


# ---- what is told of tokens


def test_tokens_by_their_ids(api_server: RunningServer, engine: Engine) -> None:
    ends = {"stop_token_ids": list(range(60, 120)), "seed": 5}
    for path in (TEXT, CHAT):
        whole = post(api_server, path, return_token_ids=True, n=2, **ends)
        prompt = whole["prompt_token_ids"] if path == CHAT else whole["choices"][0]["prompt_token_ids"]
        ended = [choice["finish_reason"] == "stop" for choice in whole["choices"]]
        texts = [
            chat_tokenizer().decode(choice["token_ids"][: len(choice["token_ids"]) - stop])
            for choice, stop in zip(whole["choices"], ended, strict=True)
        ]
        assert any(ended)
        told = [choice["text"] if path == TEXT else choice["message"]["content"] for choice in whole["choices"]]
        assert texts == told
        chunks = events(api_server, path, return_token_ids=True, n=2, **ends)
        for choice in whole["choices"]:
            parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
            assert [token for part in parts for token in part.get("token_ids") or ()] == choice["token_ids"]
            given = [part["prompt_token_ids"] for part in parts if "prompt_token_ids" in part]
            assert given == ([prompt] if path == TEXT else [])
        if path == CHAT:
            assert [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk] == [prompt] * 2
        assert all("token_ids" not in part for chunk in events(api_server, path) for part in chunk["choices"])
    echoed = events(api_server, TEXT, return_token_ids=True, echo=True)
    assert echoed[0]["choices"][0]["prompt_token_ids"] == chat_tokenizer().encode("the fox")
    assert sum("prompt_token_ids" in chunk["choices"][0] for chunk in echoed) == 1


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_log_probabilities_of_prompts_come_whole_alone(api_server: RunningServer, path: str) -> None:
    assert refusal(api_server, path, prompt_logprobs=1, stream=True)["param"] == "prompt_logprobs"
    body = post(api_server, path, prompt_logprobs=0)
    first, *places = (body if path == CHAT else body["choices"][0])["prompt_logprobs"]
    assert first is None
    for place in places:
        (entry,) = place.values()
        assert isinstance(entry["decoded_token"], str)
        assert entry["rank"] >= 1


def test_more_log_probabilities_of_a_prompt_than_of_its_answer(api_server: RunningServer) -> None:
    both = post(api_server, TEXT, prompt_logprobs=5, echo=True, logprobs=1)["choices"][0]
    assert all(len(place) <= 2 for place in both["logprobs"]["top_logprobs"][1:])
    assert all(len(place) >= 5 for place in both["prompt_logprobs"][1:])


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_each_chunk_counts_its_tokens(api_server: RunningServer, path: str) -> None:
    asked = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    *chunks, last = events(api_server, path, **asked)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert (counts[-1], len(set(counts)) > 3) == (12, True)
    for chunk in (*chunks, last):
        usage = chunk["usage"]
        assert usage["prompt_tokens"] == last["usage"]["prompt_tokens"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert last["choices"] == []
    plain = events(api_server, path, stream_options={"include_usage": True})
    assert [chunk["usage"] for chunk in plain[:-1]] == [None] * (len(plain) - 1)


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_answers_say_what_has_stopped_them(api_server: RunningServer, path: str) -> None:
    one = {"logit_bias": {"70": 100}}
    letter = chat_tokenizer().decode([70])
    for given, reason in (({"stop": [letter]}, letter), ({"stop_token_ids": [70]}, 70), ({"max_tokens": 3}, None)):
        (choice,) = post(api_server, path, **one, **given)["choices"]
        assert choice["stop_reason"] == reason
        choices = [part for chunk in events(api_server, path, **one, **given) for part in chunk["choices"]]
        assert [part["stop_reason"] for part in choices if "stop_reason" in part] == [reason] * (reason is not None)
        assert choices[-1].get("stop_reason") == reason


# ---- chats


def test_an_assistants_own_message_goes_on(api_server: RunningServer) -> None:
    messages = [*HI, {"role": "assistant", "content": "the quick"}]
    plain = post(api_server, CHAT, messages=messages, continue_final_message=True)["choices"][0]["message"]["content"]
    asked: dict[str, Any] = {"messages": messages, "continue_final_message": True, "echo": True}
    assert post(api_server, CHAT, **asked)["choices"][0]["message"]["content"] == "the quick" + plain
    deltas = [part["delta"] for chunk in events(api_server, CHAT, **asked) for part in chunk["choices"]]
    assert [delta.get("content") for delta in deltas[:2]] == ["", "the quick"]
    assert "".join(delta.get("content") or "" for delta in deltas) == "the quick" + plain
    assert post(api_server, CHAT, echo=True)["choices"] == post(api_server, CHAT)["choices"]
    tokens = api_server.http.post("/tokenize", json={"messages": messages, "continue_final_message": True}).json()
    assert tokens["tokens"] == post(api_server, CHAT, **asked, return_token_ids=True)["prompt_token_ids"]
    assert tokens["token_strs"] is None
    both = {"messages": messages, "continue_final_message": True, "add_generation_prompt": True}
    assert api_server.http.post("/tokenize", json=both).status_code == 400


def test_pieces_of_tokens(api_server: RunningServer) -> None:
    found = api_server.http.post("/tokenize", json={"prompt": "the fox", "return_token_strs": True}).json()
    assert found["token_strs"] == chat_tokenizer().convert_ids_to_tokens(found["tokens"])


def test_texts_without_special_tokens(speaking: tuple[Script, RunningServer]) -> None:
    script, api_server = speaking
    for special in (True, False):
        post(api_server, TEXT, add_special_tokens=special)
        given = {"prompt": "the fox", "add_special_tokens": special}
        assert script.asked[-1].prompt == api_server.http.post("/tokenize", json=given).json()["tokens"]


def test_health_by_its_head_alone(api_server: RunningServer) -> None:
    head = api_server.http.head("/health")
    assert (head.status_code, head.content) == (200, b"")
    assert isinstance(head, httpx.Response)
