"""HuggingFace's response templates are known by model, and its parser reads answers as events."""

from __future__ import annotations

import pytest

from compiled_llm.compat import response_templates
from compiled_llm.server.openai.parsing.answer_parts import REASONING
from support.engine.text_tokenizers import byte_level

pytestmark = pytest.mark.core


def test_huggingface_knows_templates_of_models_whose_tokenizers_have_none() -> None:
    assert response_templates.known_response_template("no such model") is None
    for model_type in ("qwen2", "qwen3", "qwen3_moe", "qwen3_5", "gemma4"):
        spec = response_templates.known_response_template(model_type)
        assert spec is not None
        assert {"content", "tool_calls"} < set(spec["fields"])
        assert set(spec["fields"]) & set(REASONING)
        assert byte_level().get_response_parser(spec, prefix="").initial_events == []


def test_answers_are_read_as_events() -> None:
    """What ``server/openai/parsing/answer_parts.py`` reads of them is public, and documented by examples alone."""
    spec = response_templates.known_response_template("qwen3")
    parser = byte_level().get_response_parser(spec, prefix="<|im_start|>assistant\n<think>a", tools=[])
    (thinking,) = set(spec["fields"]) & set(REASONING)
    begun = [{"type": "region_open", "field": thinking}]
    chunk = {"type": "region_chunk", "field": thinking, "text": "a", "dirty": False}
    assert parser.initial_events == [*begun, chunk]
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    close, _, raw, called = [*parser.feed(f"</think>{call}")]
    assert close == {"type": "region_close", "field": thinking, "value": "a"}
    assert raw["dirty"]
    function = {"name": "f", "arguments": {}}
    assert called["field"] == "tool_calls"
    assert called["value"] == {"type": "function", "function": function}
    parser.feed("b")
    _, (end,) = parser.finalize()
    assert end == {"type": "region_close", "field": "content", "value": "b"}
    with pytest.raises(ValueError, match="JSON"):
        byte_level().get_response_parser(spec, prefix="").feed("<tool_call>{</tool_call>")
