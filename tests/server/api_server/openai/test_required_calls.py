"""Answers are held to the calls that a request requires, as the chat template writes them, and to its JSON after the
thinking that a prompt begins.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import openai
import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compiled_llm.engine.engine import Engine
from compiled_llm.server.openai.fields.tools import Function
from compiled_llm.server.openai.parsing.call_form import CallForm
from compiled_llm.server.openai.parsing.response_template import response_template_of
from compiled_llm.server.openai.tokenizer.vocabulary import Vocabulary
from support.server.engine_processes import engine_that_names_its_tokenizer
from support.server.running_servers import RunningServer, chat_tokenizer, running_server
from support.server.scripted import CALL as ROME, RESPONSES, TEMPLATE, Script, speaking_server, takes, tool_tokenizer

CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Paris"]}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
TIME = {"type": "function", "function": {"name": "time"}}
STRICT = {"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}}
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "tools": [WEATHER, TIME]}
NAMED = {"type": "function", "function": {"name": "weather"}}
JSON = {"type": "json_schema", "json_schema": {"schema": {"enum": ["one", "two"]}}}
OBJECT = {"type": "json_object"}
CHAT, CALLED = "/v1/chat/completions", "messages[0].tool_calls[0].function"
THINKS = {"chat_template_kwargs": {"think": True}}

BERN = ROME.replace("Rome", "Bern")
BLANKS = [ROME.replace('{"city"', "{" + " " * count + '"city"') for count in (32, 33)]
NOW = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'

ANY_BLANKS = {"structured_outputs": {"max_whitespace_cnt": None}}

CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"tool_choice": "required"}, [ROME, NOW, f"{NOW}\n{ROME}"], ["hi", "", BERN, f"{ROME}{NOW}", f"hi {ROME}"]),
    ({"tool_choice": "required", "parallel_tool_calls": False}, [ROME, NOW], [f"{NOW}\n{ROME}"]),
    ({"tool_choice": NAMED}, [ROME, BLANKS[0]], [NOW, "hi", f"{ROME}\n{ROME}", BLANKS[1]]),
    ({"tool_choice": NAMED, **ANY_BLANKS}, [ROME, *BLANKS], [NOW]),
    ({"tool_choice": "required", **THINKS}, [f"Hm, {BERN}</think>\n\n{ROME}"], [ROME, "</think>hi"]),
    ({"response_format": JSON}, ['"one"', ROME, f"{NOW}\n{ROME}"], ["one", BERN, '"three"']),
    ({"response_format": JSON, "tools": None, **THINKS}, ['Hm.</think>"one"'], ['"one"']),
    ({"response_format": OBJECT, **THINKS}, [f"</think>{{{' ' * 32}}}"], [f"</think>{{{' ' * 33}}}"]),
    ({"tools": [STRICT]}, ["hi", ROME, f"Well:\n{ROME}", f"{ROME}\n{ROME}"], [f"hi {BERN}", "<tool_call>"]),
]


@pytest.mark.parametrize(("given", "right", "wrong"), CASES)
def test_what_is_required_is_a_grammar(
    script: Script, speaker: RunningServer, given: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    speaker.post(CHAT, **{**BODY, **given})
    form = json.loads(script.asked[-1].params["structured_outputs"]["structural_tag"])["format"]
    assert [text for text in right if not takes(form, text)] == []
    assert [text for text in wrong if takes(form, text)] == []


def test_what_is_free_has_no_grammar(script: Script, speaker: RunningServer) -> None:
    for given in ({}, {"tool_choice": "auto"}, {"tool_choice": "none"}, THINKS):
        speaker.post(CHAT, **{**BODY, **given})
        assert "structured_outputs" not in script.asked[-1].params


@pytest.fixture(scope="module")
def calling(model: PreTrainedModel) -> Iterator[RunningServer]:
    """An API server of a model that writes whatever it may."""
    with (
        Engine(model, tokenizer=tool_tokenizer()) as engine,
        engine_that_names_its_tokenizer(engine) as loop,
        running_server(loop.server._path) as api_server,
    ):
        yield api_server


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_model_calls_what_it_has_to(calling: RunningServer, choice: Any) -> None:
    body = {**BODY, "tool_choice": choice, "max_tokens": 300, "seed": 3, "parallel_tool_calls": False}
    choice = calling.http.post(CHAT, json=body).json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    arguments = json.loads(call["function"]["arguments"])
    if call["function"]["name"] == "weather":
        assert arguments["city"] in ("Rome", "Paris")


@pytest.mark.parametrize("seed", [4, *(pytest.param(seed, marks=pytest.mark.whole) for seed in (8, 17))])
def test_a_named_function_is_called_once_however_often_the_model_would(calling: RunningServer, seed: int) -> None:
    """As instructor asks, and refuses several calls."""
    asked: dict[str, Any] = {"model": "tiny", "tool_choice": NAMED, "max_tokens": 400, "seed": seed, **BODY}
    with openai.OpenAI(base_url=f"{calling.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(**asked)
        (call,) = answer.choices[0].message.tool_calls or []
        assert answer.choices[0].finish_reason == "tool_calls"
        assert json.loads(call.function.arguments)["city"] in ("Rome", "Paris")
        chunks = client.chat.completions.create(stream=True, **asked)
        parts = [part for chunk in chunks for choice in chunk.choices for part in choice.delta.tool_calls or []]
    assert {part.index for part in parts} == {0}
    assert "".join((part.function and part.function.arguments) or "" for part in parts) == call.function.arguments


# ---- bad requests


def test_tools_that_are_at_odds_are_refused_by_name(speaker: RunningServer) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "time", "arguments": "now"}}
    deep = {"name": "time", "arguments": "[" * 50_000}
    big = {"type": "function", "function": {"name": "weather", "description": "漢" * 11_000}}
    for given, param, said in [
        ({"tools": [TIME, TIME]}, "tools", "two have the name 'time'"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "there is no such tool"),
        ({"tool_choice": {"type": "function", "function": {"name": "place"}}}, "tool_choice", "no such tool"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", ""),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "pattern"),
        ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "tools[0]", ""),
        ({"tools": [TIME] * 129}, "tools", "128"),
        ({"tools": [{"type": "function", "function": {"name": "a", "description": "\ud800"}}]}, "tools", "UTF-16"),
        *(
            ({"messages": [{"role": "assistant", "tool_calls": [wrong]}]}, f"{CALLED}.arguments", "is no JSON object")
            for wrong in (call, {**call, "function": deep})
        ),
        ({"messages": [{"role": "user", "content": "hi", "tool_calls": [call]}]}, "messages[0].tool_calls", ""),
        ({"messages": [{"role": "tool", "tool_call_id": "1"}]}, "messages[0].content", "is missing"),
        ({"tool_choice": "required", "tools": [big]}, "tools", "more than 65,536 characters"),
    ]:
        content, headers = json.dumps({**BODY, **given}), {"Content-Type": "application/json"}
        response = speaker.http.post(CHAT, content=content, headers=headers)
        error = response.json()["error"]
        assert (response.status_code, error["type"]) == (400, "invalid_request_error")
        assert (error["param"] or "").startswith(param), error
        assert said in error["message"]


def test_a_model_without_templates_for_tools(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = tool_tokenizer()
    tokenizer.response_template = None
    with speaking_server(tokenizer) as (script, api_server):
        script.text = f"<think>Hm.</think>\n{ROME}\n"
        for _ in range(2):
            choice = api_server.http.post(CHAT, json=BODY).json()["choices"][0]
            assert (choice["message"]["content"], choice["finish_reason"]) == (script.text, "stop")
        assert caplog.text.count("calls of tools come as plain text") == 1
        for given, param in (
            ({"tool_choice": "required"}, "tool_choice"),
            ({"response_format": JSON}, "response_format"),
            ({"tools": [STRICT]}, "tools"),
        ):
            error = api_server.http.post(CHAT, json={**BODY, **given}).json()["error"]
            assert (error["param"], error["code"]) == (param, "unsupported_value")
            assert "calls of this model cannot be held to a form" in error["message"]
    tokenizer.chat_template = chat_tokenizer().chat_template
    with speaking_server(tokenizer) as (_, api_server):
        error = api_server.http.post(CHAT, json=BODY).json()["error"]
        assert error["message"] == "tools: is not served: the model's chat template does not write them"


# ---- the form that the chat template writes

QWENS = CallForm('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "\n")
ONLY_ONE = "{% if (messages[-1].tool_calls or []) | length > 1 %}{{ raise_exception('one') }}{% endif %}"
OF_NAMES = {
    "open_pattern": r"<call:(?P<name>\w+)>",
    "close": "</call>",
    "repeats": True,
    "content": "json",
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
}


def made_tokenizer(template: str, calls: Any = None) -> PreTrainedTokenizerBase:
    made, responses = tool_tokenizer(), deepcopy(RESPONSES)
    made.chat_template, made.response_template = template, responses
    if calls is not None:
        responses["fields"]["tool_calls"] = calls  # type: ignore[index]
    return made


def form_of(tokenizer: PreTrainedTokenizerBase) -> CallForm | None:
    return Vocabulary(tokenizer, "", [tokenizer.convert_tokens_to_ids("</s>")]).call_form


def test_the_form_is_what_the_chat_template_writes() -> None:
    assert form_of(made_tokenizer(TEMPLATE)) == QWENS
    assert form_of(made_tokenizer(ONLY_ONE + TEMPLATE)) == replace(QWENS, separator=None)


def test_a_name_may_stand_in_the_beginning() -> None:
    begun = """'\\n<tool_call>\\n' -}}\n{"name": \""""
    written = TEMPLATE.replace(begun, "'<call:' }}").replace('", "arguments": ', ">")
    written = written.replace("}\n</tool_call>", "</call>")
    assert form_of(made_tokenizer(written, OF_NAMES)) == CallForm("<call:", ">", "</call>", "")


@pytest.mark.parametrize("form", [QWENS, CallForm("<call:", ">", "</call>", ""), CallForm("<call:", ">", "", ";")])
def test_a_function_stands_in_the_form_of_several_calls_once(form: CallForm) -> None:
    functions = [Function(name=f"f{number}", parameters={"description": f"of {number}"}) for number in range(6)]
    tag = form.several(functions, several=True)
    assert [json.dumps(tag).count(f"of {number}") for number in range(6)] == [1] * 6
    calls = [f"{form.before_name}f{number}{form.before_arguments}{{}}{form.end}" for number in (5, 0, 5)]
    assert takes(tag, calls[0])
    assert takes(tag, (form.separator or "").join(calls))
    assert not takes(tag, "")
    assert not takes(tag, " ".join(calls))


XML = {
    "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
    "close_pattern": r"</function>\s*</tool_call>",
    "repeats": True,
    "content": "xml-inline",
    "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
}


def test_arguments_may_be_written_as_qwen_writes_them() -> None:
    written = TEMPLATE.replace(
        '{"name": "{{ call.function.name }}", "arguments": ', "<function={{ call.function.name }}>\n"
    )
    each = "{% for name, value in call.function.arguments.items() %}<parameter={{ name }}>\n{{ value }}\n</parameter>\n"
    written = written.replace("{{ call.function.arguments | tojson }}}\n", each + "{% endfor %}</function>\n")
    form = form_of(made_tokenizer(written, XML))
    assert form == CallForm("<tool_call>\n<function=", ">\n", "\n</function>\n</tool_call>", "\n", "qwen_xml")
    properties = {"city": {"type": "string"}, "days": {"type": "integer"}}
    schema = {"type": "object", "properties": properties, "required": ["city", "days"]}
    tag = form.several([Function(name="weather", parameters=schema)], several=False)
    begin, end = "<tool_call>\n<function=weather>\n", "\n</function>\n</tool_call>"
    city, days = "<parameter=city>\nRome\n</parameter>", "<parameter=days>\n{}\n</parameter>"
    assert takes(tag, f"{begin}{city}\n{days.format(3)}{end}")
    assert not takes(tag, f"{begin}{city}\n{days.format('three')}{end}")
    assert not takes(tag, f"{begin}{city}{end}")


def test_a_prompt_that_begins_to_think_has_the_same_form() -> None:
    assert form_of(made_tokenizer(TEMPLATE.replace("{% if think %}", "{% if true %}"))) == QWENS


@pytest.mark.parametrize(
    "written",
    [
        TEMPLATE.replace(" | tojson }}}", ".city }}}"),  # arguments that are no JSON
        TEMPLATE.replace("<tool_call>", "<other>"),  # what is read is not what is written
        TEMPLATE.replace('{"name": "{{ call.function.name }}"', '{"function": "{{ call.function.name }}"'),
        "{{ raise_exception('no') }}",
    ],
)
def test_what_is_not_read_as_it_is_written_has_no_form(written: str) -> None:
    assert form_of(made_tokenizer(written)) is None
    assert form_of(chat_tokenizer()) is None


def test_huggingfaces_templates_are_taken_where_the_prompt_begins_an_answer_as_they_say() -> None:
    made = tool_tokenizer()
    made.response_template = None
    assert response_template_of(made, "qwen3") is not None
    assert response_template_of(made, "llama") is None
    assert response_template_of(chat_tokenizer(), "qwen3") is None
    assert form_of(made) is None
    assert Vocabulary(made, "qwen3").call_form == QWENS


def test_special_tokens_are_kept_if_parts_begin_or_end_with_one() -> None:
    made = tool_tokenizer()
    for needed in (False, True):
        template = response_template_of(made, "")
        assert template is not None
        assert template.needs_special_tokens == needed
        made.add_special_tokens({"additional_special_tokens": ["<think>"]})


def test_a_template_that_is_wrong_is_said(caplog: pytest.LogCaptureFixture) -> None:
    made = tool_tokenizer()
    made.response_template = {**RESPONSES, "fields": {"content": {"content": "nothing"}}}
    assert response_template_of(made, "") is None
    assert "answers are plain text: the response template is wrong: " in caplog.text
