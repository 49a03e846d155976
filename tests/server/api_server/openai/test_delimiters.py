"""Text that no parser needs to see is told from text in which a part may begin or end."""

from __future__ import annotations

import pytest

from compiled_llm.compat.response_templates import known_response_template
from compiled_llm.server.openai.parsing.delimiters import Delimiters


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
