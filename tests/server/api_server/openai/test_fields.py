"""Every field of OpenAI's requests is served, has no effect and says so, or is refused by name; and those that vLLM and
SGLang have besides, through the openai client and as they are sent.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsStreaming as TextParams
from openai.types.responses.response_create_params import ResponseCreateParamsStreaming as ResponsesParams

from compiled_llm.engine.engine import Engine
from compiled_llm.server.openai.chat.request import ChatRequest, Message
from compiled_llm.server.openai.completions.request import CompletionRequest
from compiled_llm.server.openai.fields.fields import Body, NoEffect, RefusedField
from compiled_llm.server.openai.responses.request import ResponsesRequest
from support.docs.pages import DOCS
from support.server.running_servers import RunningServer, chat_tokenizer
from support.server.scripted import Script, takes

TEXT, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
HI: Any = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    TEXT: {"prompt": "the fox", "max_tokens": 12, "seed": 3},
    CHAT: {"messages": HI, "max_tokens": 12, "seed": 3},
    RESPONSES: {"input": "hi", "max_output_tokens": 12, "seed": 3},
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


def post(api_server: RunningServer, path: str, **fields: Any) -> Any:
    return api_server.post(path, **{**BODIES[path], **fields})


def refusal(api_server: RunningServer, path: str, **fields: Any) -> dict[str, Any]:
    response = api_server.http.post(path, json={**BODIES[path], **fields})
    assert response.status_code == 400, response.text
    found: dict[str, Any] = response.json()["error"]
    assert found["type"] == "invalid_request_error"
    return found


def events(api_server: RunningServer, path: str, **fields: Any) -> list[dict[str, Any]]:
    return list(api_server.events(path, **{**BODIES[path], **fields}))


def text_of(path: str, body: dict[str, Any]) -> str:
    if path == RESPONSES:
        return "".join(part["text"] for item in body["output"] for part in item["content"])
    (choice,) = body["choices"]
    return str(choice["text"] if path == TEXT else choice["message"]["content"])


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
    found = refusal(api_server, path, **{name: "something"})
    assert found["param"] == name
    assert found["message"].startswith(f"{name}: is not served: ")
    assert found["code"] == "unsupported_value"
    (mark,) = (mark for mark in MODELS[path].model_fields[name].metadata if isinstance(mark, RefusedField))
    for neutral in (None, *mark.neutral):
        post(api_server, path, **{name: neutral})


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
    def said(**more: Any) -> str:
        if name == "stream_options":
            return text_of(path, events(api_server, path, **more)[-1]["response"])
        return text_of(path, post(api_server, path, **more))

    assert said(**{name: EXAMPLES[name]}) == said()
    if name != "access_programs":  # of which nothing is known
        assert refusal(api_server, path, **{name: 1.5})["param"] == name


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
    assert (refusal(api_server, path, **{name: wrong})["param"] or "").startswith(name)


@pytest.mark.parametrize("path", MODELS)
def test_what_nobody_knows_is_refused_by_name(api_server: RunningServer, path: str) -> None:
    found = refusal(api_server, path, colour="red")
    assert (found["param"], found["code"]) == ("colour", "unknown_parameter")
    found = refusal(api_server, path, stream=True, stream_options={"colour": 1})
    assert found["param"] == "stream_options.colour"


def test_fields_of_messages_are_refused_by_name(api_server: RunningServer) -> None:
    for name in ("audio", "tool_calls", "function_call", "refusal"):
        assert name in Message.model_fields
        found = refusal(api_server, CHAT, messages=[{"role": "user", "content": "hi", name: {"a": 1}}])
        assert found["param"] == f"messages[0].{name}"


# ---- forms

NUMBER = {"type": "integer", "minimum": 10, "maximum": 99}
DIGITS, CHOICE, GRAMMAR = "[1-9][0-9]", ["11", "22"], "root ::= [1-9] [0-9]"
TAG = {"type": "structural_tag", "format": {"type": "regex", "pattern": DIGITS}}
OUTPUTS = {"json": NUMBER, "regex": DIGITS, "choice": CHOICE, "grammar": GRAMMAR, "structural_tag": json.dumps(TAG)}
FORMS: list[tuple[str, Any]] = [
    *(("guided_json", json.dumps(NUMBER)), ("json_schema", NUMBER), ("structural_tag", TAG), ("guided_choice", CHOICE)),
    *(("guided_regex", DIGITS), ("regex", DIGITS), ("guided_grammar", GRAMMAR), ("ebnf", GRAMMAR)),
    *(("structured_outputs", {name: form}) for name, form in OUTPUTS.items()),
]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("name", "form"), FORMS)
def test_forms_by_all_their_names(api_server: RunningServer, path: str, name: str, form: Any) -> None:
    text = text_of(path, post(api_server, path, **{name: form}))
    assert 10 <= int(text) <= 99


def test_white_space_is_said_beside_a_response_format(script: Script, speaker: RunningServer) -> None:
    wanted = {"response_format": {"type": "json_object"}}
    for said, params in (
        ({"disable_any_whitespace": True}, {"json_object": True, "disable_any_whitespace": True}),
        ({"max_whitespace_cnt": 3}, {"json_object": True, "max_whitespace_cnt": 3}),
        ({"max_whitespace_cnt": None}, {"json_object": True, "max_whitespace_cnt": None}),
        ({}, {"json_object": True}),
    ):
        post(speaker, CHAT, **wanted, structured_outputs=said)
        assert script.asked[-1].params["structured_outputs"] == params
    post(speaker, CHAT, structured_outputs={})
    assert "structured_outputs" not in script.asked[-1].params


def test_tags_as_a_response_format(script: Script, speaker: RunningServer) -> None:
    for given in ({"format": {"type": "any_text"}}, {"structures": [], "triggers": ["<a>"]}):
        tag = {"type": "structural_tag", **given}
        post(speaker, CHAT, response_format=tag)
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


@pytest.mark.parametrize(("name", "given"), FORMS)
def test_forms_come_after_thinking(script: Script, speaker: RunningServer, name: str, given: Any) -> None:
    post(speaker, CHAT, **{name: given}, chat_template_kwargs={"think": True})
    form = json.loads(script.asked[-1].params["structured_outputs"]["structural_tag"])["format"]
    assert takes(form, "Hm.</think>\n\n22")
    assert not takes(form, "22")
    assert not takes(form, "Hm.</think>\n\n222")


def test_forms_that_cannot_come_after_thinking_are_refused(speaker: RunningServer) -> None:
    thinks = {"chat_template_kwargs": {"think": True}}
    for given in (
        {"guided_grammar": 'start: "a"'},
        {"structural_tag": {"structures": [{"begin": "a", "schema": {}, "end": "b"}], "triggers": ["a"]}},
        {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
    ):
        found = refusal(speaker, CHAT, **given, **thinks)
        assert (found["param"], found["code"]) == (next(iter(given)), "unsupported_value")
        post(speaker, CHAT, **given)


# ---- the order in which requests run, and their prompts


def of_text(path: str, text: str) -> dict[str, Any]:
    chat = {"messages": [{"role": "user", "content": text}]}
    return {TEXT: {"prompt": text}, RESPONSES: {"input": text}, CHAT: chat}[path]


@pytest.mark.parametrize("path", BODIES)
def test_a_priority_and_a_salt_reach_the_engine(script: Script, speaker: RunningServer, path: str) -> None:
    for given in (None, -3, 7):
        post(speaker, path, priority=given, cache_salt="mine")
        assert (script.asked[-1].priority, script.asked[-1].cache_salt) == (given or 0, "mine")
    assert refusal(speaker, path, priority=2**31)["param"] == "priority"


@pytest.mark.parametrize("path", BODIES)
def test_a_prompt_is_cut_at_its_beginning(script: Script, speaker: RunningServer, path: str) -> None:
    post(speaker, path)
    whole = script.asked[-1].prompt
    for most in (1, 3, len(whole), 1000, -1):
        post(speaker, path, truncate_prompt_tokens=most)
        assert script.asked[-1].prompt == (whole if most == -1 else whole[-most:])
    post(speaker, path, truncate_prompt_tokens=3, truncation_side="right")
    assert script.asked[-1].prompt == whole[:3]
    assert refusal(speaker, path, truncate_prompt_tokens=0)["param"] == "truncate_prompt_tokens"
    longer = of_text(path, "a " * 9000)
    assert refusal(speaker, path, **longer)["code"] == "context_length_exceeded"
    post(speaker, path, truncate_prompt_tokens=-1, **longer)
    assert len(script.asked[-1].prompt) == 4000 - 12


def test_an_echo_is_the_prompt_that_the_model_saw(script: Script, speaker: RunningServer) -> None:
    script.text, prompts = " d", ["a b c", "e f g"]
    for given in (prompts, [script.tokens(prompt) for prompt in prompts]):
        asked: dict[str, Any] = {"prompt": given, "echo": True, "max_tokens": 4}
        for more in ({"truncate_prompt_tokens": 2}, {"truncate_prompt_tokens": 3, "truncation_side": "right"}, {}):
            told = [choice["text"] for choice in post(speaker, TEXT, **asked, **more)["choices"]]
            seen = [script.tokenizer.decode(submitted.prompt) for submitted in script.asked[-2:]]
            assert told == [f"{text} d" for text in seen]
            assert (seen == prompts) == (not more)
            chunks = [part for chunk in events(speaker, TEXT, **asked, **more) for part in chunk["choices"]]
            for index, text in enumerate(told):
                assert "".join(part["text"] for part in chunks if part["index"] == index) == text


@pytest.mark.parametrize("path", BODIES)
def test_a_text_that_cannot_fit_is_refused_though_it_would_be_cut(speaker: RunningServer, path: str) -> None:
    refused = refusal(speaker, path, truncate_prompt_tokens=-1, **of_text(path, "a b " * 30_000))
    assert refused["code"] == "context_length_exceeded"
    assert "truncate_prompt_tokens cuts tokens" in refused["message"]
    assert "chat template" not in refused["message"]


def test_effort_goes_to_the_template(script: Script, speaker: RunningServer) -> None:
    tokenizer: Any = speaker.api_server.link.model.vocabulary.tokenizer
    before = tokenizer.chat_template
    tokenizer.chat_template = "{{ reasoning_effort }} {{ enable_thinking }} {{ colour }}" + before
    try:
        for effort, said in (("low", "low  "), ("none", "none False "), (None, "  ")):
            post(speaker, CHAT, reasoning_effort=effort)
            assert script.prompt.startswith(said)
            post(speaker, RESPONSES, reasoning={"effort": effort, "summary": "auto"})
            assert script.prompt.startswith(said)
        post(speaker, CHAT, reasoning_effort="none", chat_template_kwargs={"enable_thinking": True})
        assert script.prompt.startswith("none True ")
        post(speaker, RESPONSES, chat_template_kwargs={"colour": "red"})
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
    assert refusal(api_server, path, prompt_logprobs_start=1)["param"] == "prompt_logprobs_start"
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
    found = api_server.post("/tokenize", prompt="the fox", return_token_strs=True)
    assert found["token_strs"] == chat_tokenizer().convert_ids_to_tokens(found["tokens"])
    both = {"messages": messages, "continue_final_message": True, "add_generation_prompt": True}
    assert api_server.http.post("/tokenize", json=both).status_code == 400


def test_texts_without_special_tokens(script: Script, speaker: RunningServer) -> None:
    for special in (True, False):
        post(speaker, TEXT, add_special_tokens=special)
        given = {"prompt": "the fox", "add_special_tokens": special}
        assert script.asked[-1].prompt == speaker.http.post("/tokenize", json=given).json()["tokens"]
