"""SmolLM2's real weights call a function, by templates that are written for it here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

import compiled_llm
from support.server.running_servers import serving
from support.server.scripted import RESPONSES, TEMPLATE

CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": CITY, "description": "of a city"}}
MESSAGES: Any = [{"role": "user", "content": "What is the weather in Rome?"}]

pytestmark = pytest.mark.whole


@pytest.fixture(scope="module")
def folder(demo_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As files of their own, so that the API server needs no torch."""
    folder = tmp_path_factory.mktemp("served") / "smollm2"
    model, tokenizer = compiled_llm.demo()
    model.save_pretrained(folder)
    tokenizer.chat_template = TEMPLATE.replace("</s>", "<|im_end|>")
    tokenizer.response_template = json.loads(json.dumps(RESPONSES).replace("</s>", "<\\\\|im_end\\\\|>"))
    tokenizer.save_pretrained(folder)
    return folder


def test_a_call_is_answered_and_the_chat_goes_on(folder: Path) -> None:
    with serving(folder, "--mode", "eager", "--kv-memory", "4000 tokens") as (_, url):
        client: Any = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=20)
        asked = {
            "model": folder.name,
            "tools": [WEATHER],
            "temperature": 0,
            "max_tokens": 60,
            "parallel_tool_calls": False,
        }
        choice = client.chat.completions.create(**asked, messages=MESSAGES, tool_choice="required").choices[0]
        call = choice.message.tool_calls[0]
        assert (choice.finish_reason, call.function.name) == ("tool_calls", "weather")
        assert json.loads(call.function.arguments) == {"city": "Rome"}
        result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        again = client.chat.completions.create(**asked, messages=[*MESSAGES, choice.message, result])
        assert again.choices[0].message.content or again.choices[0].message.tool_calls
        with client.chat.completions.stream(**asked, messages=MESSAGES, tool_choice="required") as stream:
            streamed = stream.get_final_completion().choices[0]
        assert streamed.message.tool_calls[0].function.arguments == call.function.arguments
        response = client.responses.create(
            model=folder.name,
            input="What is the weather in Rome?",
            tools=[{"type": "function", **WEATHER["function"]}],
            tool_choice="required",
            parallel_tool_calls=False,
            temperature=0,
            max_output_tokens=60,
        )
        assert json.loads(response.output[0].arguments) == {"city": "Rome"}
