"""Whatever a prompt has begun, and however its answer comes: what is told of it is the model's text, in its order.

``pytest tests/server/api_server/openai/test_answers_after_prompts.py --fuzz-seconds 600 --fuzz-seed 10000 -s`` goes on
with other answers.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from compiled_llm.server.openai.parsing.answer_parts import Parts
from compiled_llm.server.openai.parsing.response_template import ResponseTemplate
from support.server.random_answers import FORMS, RandomAnswer, Told
from support.server.response_templates import SPECS, TOOLS
from support.server.scripted import Script, tool_tokenizer

CASES = 60


@cache
def template(style: str) -> ResponseTemplate:
    return ResponseTemplate(tool_tokenizer(), SPECS[style])


def read(answer: RandomAnswer, pieces: list[str]) -> Told:
    reader, whole = template(answer.style).reader(answer.prompt, TOOLS), Parts()
    for number, piece in enumerate(pieces, start=1):
        parts = reader.read(piece, finished=number == len(pieces))
        whole.reasoning, whole.content = whole.reasoning + parts.reasoning, whole.content + parts.content
        whole.pieces += parts.pieces
    return Told(whole.reasoning, whole.content, [(call.name or "", call.arguments) for call in whole.calls])


def seeds(request: pytest.FixtureRequest) -> Iterator[int]:
    option = request.config.getoption
    first = 1000 * option("--seed") if option("--fuzz-seed") is None else option("--fuzz-seed")
    count, over = option("--fuzz-cases") or CASES, time.monotonic() + option("--fuzz-seconds")
    number = 0
    while number < count or time.monotonic() < over:
        yield first + number
        number += 1
    print(f"{number} answers from --fuzz-seed={first} on")


@pytest.mark.timeout(0)
@pytest.mark.parametrize("style", FORMS)
def test_whole_answers_and_their_pieces_are_the_models_text(style: str, request: pytest.FixtureRequest) -> None:
    for seed in seeds(request):
        draw = random.Random(f"{seed} {style}")
        answer = RandomAnswer.drawn(style, draw)
        for pieces in ([answer.answer], answer.pieces(draw), list(answer.answer) or [""]):
            assert read(answer, pieces) == answer.told(), (f"--fuzz-seed={seed}", answer.prompt, pieces)


JSON = '{"a": [1, 2], "b": "<x>"}'
SURE = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Sure, <it is \n\n"}]


@pytest.mark.parametrize("text", [JSON, f" {JSON}", "<x> [1]  a {\n b"])
@pytest.mark.parametrize("at_once", [1, 7, 1000])
def test_without_thinking_the_text_comes_in_its_order(talker: Any, script: Script, text: str, at_once: int) -> None:
    script.text, script.at_once = text, at_once
    chat: dict[str, Any] = {"model": "tiny", "messages": SURE[:1], "extra_body": {"reasoning_effort": "none"}}
    item: dict[str, Any] = {"model": "tiny", "input": "hi", "reasoning": {"effort": "none"}}
    assert talker.chat.completions.create(**chat).choices[0].message.content == text.strip()
    chunks = talker.chat.completions.create(stream=True, **chat)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text.strip()
    assert script.prompt.endswith("<think>\n\n</think>\n\n")
    assert talker.responses.create(**item).output_text == text.strip()
    events = talker.responses.create(stream=True, **item)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == text.strip()
    assert script.prompt.endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize("text", [JSON, f" {JSON}", "<x> [1]  a {\n b"])
@pytest.mark.parametrize("at_once", [1, 1000])
def test_a_message_that_goes_on_is_not_told_again(talker: Any, script: Script, text: str, at_once: int) -> None:
    script.text, script.at_once = text, at_once
    for echo, said in ((False, text), (True, SURE[-1]["content"] + text)):
        options: Any = {"extra_body": {"continue_final_message": True, "echo": echo}}
        chat: dict[str, Any] = {"model": "tiny", "messages": SURE, **options}
        assert talker.chat.completions.create(**chat).choices[0].message.content == said
        chunks = talker.chat.completions.create(stream=True, **chat)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == said
        assert script.prompt.endswith(SURE[-1]["content"])
