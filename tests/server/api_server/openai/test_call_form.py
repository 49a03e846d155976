"""What an answer is held to where calls of tools are required, found by what the chat template writes."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from compiled_llm.server.openai.fields.tools import Function
from compiled_llm.server.openai.parsing.call_form import CallForm
from compiled_llm.server.openai.parsing.response_template import response_template_of
from compiled_llm.server.openai.tokenizer.vocabulary import Vocabulary
from support.server.accepting import takes
from support.server.running_servers import chat_tokenizer
from support.server.scripted import RESPONSES, TEMPLATE, tool_tokenizer

QWENS = CallForm('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "\n")
ONLY_ONE = "{% if (messages[-1].tool_calls or []) | length > 1 %}{{ raise_exception('one') }}{% endif %}"
NAMED = {
    "open_pattern": r"<call:(?P<name>\w+)>",
    "close": "</call>",
    "repeats": True,
    "content": "json",
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
}


def tokenizer(template: str, calls: Any = None) -> PreTrainedTokenizerBase:
    made, responses = tool_tokenizer(), deepcopy(RESPONSES)
    made.chat_template, made.response_template = template, responses
    if calls is not None:
        responses["fields"]["tool_calls"] = calls  # type: ignore[index]
    return made


def form_of(tokenizer: PreTrainedTokenizerBase) -> CallForm | None:
    return Vocabulary(tokenizer, "", [tokenizer.convert_tokens_to_ids("</s>")]).call_form


def test_the_form_is_what_the_chat_template_writes() -> None:
    assert form_of(tokenizer(TEMPLATE)) == QWENS
    assert form_of(tokenizer(ONLY_ONE + TEMPLATE)) == replace(QWENS, separator=None)


def test_a_name_may_stand_in_the_beginning() -> None:
    begun = """'\\n<tool_call>\\n' -}}\n{"name": \""""
    written = TEMPLATE.replace(begun, "'<call:' }}").replace('", "arguments": ', ">")
    written = written.replace("}\n</tool_call>", "</call>")
    assert form_of(tokenizer(written, NAMED)) == CallForm("<call:", ">", "</call>", "")


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
    form = form_of(tokenizer(written, XML))
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
    assert form_of(tokenizer(TEMPLATE.replace("{% if think %}", "{% if true %}"))) == QWENS


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
    assert form_of(tokenizer(written)) is None
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
    template = response_template_of(made, "")
    assert template is not None
    assert not template.needs_special_tokens
    made.add_special_tokens({"additional_special_tokens": ["<think>"]})
    template = response_template_of(made, "")
    assert template is not None
    assert template.needs_special_tokens


def test_a_template_that_is_wrong_is_said(caplog: pytest.LogCaptureFixture) -> None:
    made = tool_tokenizer()
    made.response_template = {**RESPONSES, "fields": {"content": {"content": "nothing"}}}
    assert response_template_of(made, "") is None
    assert "answers are plain text: the response template is wrong: " in caplog.text
