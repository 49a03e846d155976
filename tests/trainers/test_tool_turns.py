"""Answers that call tools, in three turns: each turn is sampled by the engine, over the pages of the turns before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.rollouts import by_engine, policy, ratios_of, trained
from support.tiny_tokenizer import tokenizer

CLOSE = 1e-4
PAGE = 16
ASKED = ("tell me something about letters", "spell what you like best of all words")
CHAT = (
    "{% for message in messages %}{{ message.role }} {{ message.content }}{% for call in message.tool_calls or [] %} "
    "{{ call.function.name }} {{ call.function.arguments | tojson }}{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


def backwards(text: str) -> str:
    """Spell a text backwards.

    Args:
        text: some letters.

    Returns:
        the letters, the last one first.
    """
    return text[::-1] or "nothing"


def calling() -> Any:
    """A tokenizer of letters, by which each answer calls the tool with what it says."""
    letters = tokenizer()
    letters.padding_side, letters.chat_template = "left", CHAT

    def parsed(ids: list[int], **_: Any) -> dict[str, Any]:
        said = letters.decode(ids, skip_special_tokens=True)
        call = {"name": backwards.__name__, "arguments": {"text": said}}
        return {"role": "assistant", "content": said, "tool_calls": [{"type": "function", "function": call}]}

    letters.response_template, letters.parse_response = {}, parsed
    return letters


def model() -> Any:
    """A policy whose answers end early: half of all letters end one."""
    plain = policy()
    plain.generation_config.eos_token_id = [2, *range(4, 70, 2)]
    return plain


def options(steps: int, **others: Any) -> dict[str, Any]:
    prompts = [{"prompt": [{"role": "user", "content": text}]} for text in ASKED]
    turns = {"max_tool_calling_iterations": 2, "max_completion_length": 160}
    return {"steps": steps, "prompts": prompts, "tools": [backwards], "processing_class": calling(), **turns, **others}


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_turns_begin_with_the_pages_of_those_before_and_trl_corrects_by_nothing(
    lora: bool, tmp_path: Path, whole: bool
) -> None:
    _, run, engine, calls = by_engine(tmp_path, model(), sleep=lora, lora=lora, **options(20 if whole else 4))
    engine.close()
    assert max(run.differences) < CLOSE
    assert all(abs(ratio - 1) < 10 * CLOSE for ratio in ratios_of(run))
    known, later = list[tuple[int, ...]](), 0
    for call in calls:
        for output in call:
            prompt = (*output.prompt_token_ids,)
            if before := max((len(text) for text in known if text == prompt[: len(text)]), default=0):
                assert output.cached_tokens >= (before - 1) // PAGE * PAGE > PAGE
                later += 1
        known = [(*output.prompt_token_ids, *output.token_ids) for output in call]
    assert later > 10 * len(run.answers), "of 16 in two turns, since long answers leave no room for another"


def test_greedy_turns_are_those_of_an_unwrapped_model(tmp_path: Path, whole: bool) -> None:
    given = options(20 if whole else 4, top_k=1, entropy_coef=0.05)
    _, run, engine, calls = by_engine(tmp_path, model(), **given)
    engine.close()
    unwrapped = trained(model(), tmp_path, **given)
    assert len(calls) > 2 * len(run.answers), "some had three turns"
    assert run.answers == unwrapped.answers
    torch.testing.assert_close(run.rewards, unwrapped.rewards)
