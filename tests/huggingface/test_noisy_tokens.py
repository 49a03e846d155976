"""In bfloat16, each token is the one that HuggingFace's processors choose, but for near ties."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import compiled_llm
from support.huggingface.followed import ENDS, NEW_TOKENS, SETTINGS, assert_chosen_by_huggingfaces_processors, judged
from support.parity import greedy, mixed_prompts
from support.tiny_models import tiny_qwen3

OPTIONS: dict[str, Any] = {"mode": "eager", "page_size": 16, "max_batch_size": 8, "progress": False}


@pytest.fixture(scope="module")
def three() -> tuple[PreTrainedModel, PreTrainedModel, PreTrainedModel]:
    """HuggingFace's in float32 and in bfloat16, and a wrapped one."""
    plain = tiny_qwen3(head_dim=64, hidden_size=256, eos_token_id=None).to(torch.bfloat16)
    return copy.deepcopy(plain).float(), plain, compiled_llm.wrap(copy.deepcopy(plain), **OPTIONS)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if "s_t" in n else pytest.mark.whole) for n in SETTINGS])
def test_tokens_are_chosen_by_huggingfaces_processors(name: str, three: Any, seed: int) -> None:
    exact, theirs, wrapped = three
    inputs = mixed_prompts([40, 90, 60], 128, seed)
    options = {"eos_token_id": ENDS, "pad_token_id": 0, **SETTINGS[name]}
    text = greedy(wrapped, inputs, NEW_TOKENS, **options)
    assert_chosen_by_huggingfaces_processors(judged(text, exact, theirs, inputs, **SETTINGS[name]))
    assert wrapped.compiled.stats().generate_calls.keys() == {"fast loop"}


def test_tokens_that_are_not_are_noticed(three: Any, seed: int) -> None:
    exact, theirs, wrapped = three
    inputs = mixed_prompts([40, 90, 60], 128, seed)
    text = greedy(wrapped, inputs, NEW_TOKENS, eos_token_id=ENDS, pad_token_id=0)
    assert judged(text, exact, theirs, inputs).widest <= 1
    for name in ("suppress_tokens", "repetition_penalty", "begin_suppress_tokens"):
        assert judged(text, exact, theirs, inputs, **SETTINGS[name]).widest > 1, name
