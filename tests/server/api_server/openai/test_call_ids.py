"""Calls have ids that the model's chat template takes when they are sent back: OpenAI's, or as it checks them."""

from __future__ import annotations

import re
from typing import Any

import openai
import pytest

from support.server.scripted import CALL, TEMPLATE, WEATHER, speaking_server, tool_tokenizer

OPENAIS, NINE = r"call_[0-9a-f]{24}", r"[a-zA-Z0-9]{9}"
MISTRALS = (
    "{%- for message in messages %}{%- for call in message.tool_calls or [] %}{%- if call.id|length != 9 %}"
    "{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{%- endif %}{%- endfor %}"
    "{%- endfor %}" + TEMPLATE
)
HI: list[Any] = [{"role": "user", "content": "hi"}]
FORCED: dict[str, Any] = {"tool_choice": {"type": "function", "function": {"name": "weather"}}}


@pytest.mark.parametrize(("template", "ids"), [(TEMPLATE, OPENAIS), (MISTRALS, NINE)], ids=["any", "nine characters"])
@pytest.mark.parametrize("given", [{}, FORCED], ids=["free", "forced"])
def test_the_template_takes_an_id_that_is_sent_back(template: str, ids: str, given: dict[str, Any]) -> None:
    tokenizer = tool_tokenizer()
    tokenizer.chat_template = template
    with (
        speaking_server(tokenizer) as (script, api_server),
        openai.OpenAI(base_url=f"{api_server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        script.text = f"{CALL}\n{CALL}"
        ask: dict[str, Any] = {"model": "tiny", "tools": [WEATHER], "parallel_tool_calls": True, **given}
        message = client.chat.completions.create(messages=HI, **ask).choices[0].message
        chunks = client.chat.completions.create(messages=HI, stream=True, **ask)
        parts = [part for chunk in chunks for choice in chunk.choices for part in choice.delta.tool_calls or []]
        answer = client.responses.create(model="tiny", input="hi", tools=[{"type": "function", **WEATHER["function"]}])  # type: ignore[typeddict-item]
        called = [item.call_id for item in answer.output if item.type == "function_call"]
        found = [*(call.id for call in message.tool_calls or []), *(part.id for part in parts if part.id), *called]
        assert len(found) == len({*found}) == (4 if given else 6)
        assert [call_id for call_id in found if not re.fullmatch(ids, call_id)] == []
        results = [{"role": "tool", "tool_call_id": call.id, "content": "mild"} for call in message.tool_calls or []]
        script.text = "Mild."
        again = client.chat.completions.create(messages=[*HI, message.to_dict(), *results], **ask)  # type: ignore[list-item]
        assert again.choices[0].message.content == "Mild."
