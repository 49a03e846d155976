"""Text that no parser needs to see is told from text in which a part may begin or end."""

from __future__ import annotations

import random
from typing import Any

import pytest

from compiled_llm.compat.response_templates import known_response_template
from compiled_llm.server.openai.parsing.call_form import SAMPLE_TOOL
from compiled_llm.server.openai.parsing.delimiters import Delimiters
from compiled_llm.server.openai.parsing.response_template import ResponseTemplate
from support.server.answer_reading import Told, read_in_pieces
from support.server.scripted import RESPONSES, tool_tokenizer

QWENS: dict[str, Any] = known_response_template("qwen3") or {}
PIECES = [
    "<think>",
    "</think>",
    "<tool_call>",
    '{"name": "f", "arguments": {}}',
    "</tool_call>",
    "hello",
    " ",
    "\n",
    "<",
]


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_5", "gemma4"])
def test_most_text_is_far_from_known_delimiters(model_type: str) -> None:
    delimiters = Delimiters((known_response_template(model_type) or {})["fields"])
    for text in (" quick brown", "漢字", "a > b, {c}", "\n\n1. one"):
        assert delimiters.are_far_from(text)
    for text in ("a <", "<", "x <think> y"):
        assert not delimiters.are_far_from(text)


@pytest.mark.parametrize("pattern", [r"(?<=a)b", r"\bcall", r".all", r"[^a]b", "^a"])
def test_patterns_that_may_begin_anywhere_are_far_from_nothing(pattern: str) -> None:
    assert not Delimiters({"content": {}, "tool_calls": {"open_pattern": pattern}}).are_far_from("hello")


def test_blanks_before_a_delimiter_wait_for_it() -> None:
    delimiters = Delimiters({"tool_calls": {"open_pattern": r"\s*<call>", "close": ["end", "stop"]}})
    assert delimiters.are_far_from(" a b")
    assert not delimiters.are_far_from("a ")
    assert not delimiters.are_far_from("the")
    assert not Delimiters({"tool_calls": {"open": " a"}}).are_far_from("b c")


@pytest.mark.parametrize("spec", [RESPONSES, QWENS])
@pytest.mark.parametrize("seed", range(20))
def test_parts_are_the_same_if_the_parser_sees_everything(spec: dict[str, Any], seed: int) -> None:
    draw = random.Random(seed)
    text = "".join(draw.choices(PIECES, k=30))

    def read(delimiters: Delimiters, at_once: int) -> Told:
        template = ResponseTemplate(tool_tokenizer(), spec)
        template._delimiters = delimiters
        pieces = [text[begin : begin + at_once] for begin in range(0, len(text), at_once)]
        return read_in_pieces(template.reader("", [SAMPLE_TOOL]), pieces)

    everything = read(Nowhere(spec["fields"]), 1)
    for at_once in (1, 3, 1000):
        assert read(Delimiters(spec["fields"]), at_once) == everything
        assert read(Nowhere(spec["fields"]), at_once) == everything


class Nowhere(Delimiters):
    def are_far_from(self, text: str) -> bool:
        return False
