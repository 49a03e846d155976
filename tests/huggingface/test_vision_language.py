"""Vision-language models: text alone is the fast loop's, token for token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import compiled_llm
from support.parity import assert_account_is_empty, greedy, mixed_prompts
from support.vision import FAMILIES, make, types_of_text

OPTIONS: dict[str, Any] = {"page_size": 4, "kv_memory": "2000 tokens", "max_batch_size": 8, "progress": False}
pytestmark = pytest.mark.core


def pair(family: str, seed: int, mode: str = "eager") -> tuple[PreTrainedModel, PreTrainedModel]:
    return make(family, seed), compiled_llm.wrap(make(family, seed), mode=mode, **OPTIONS)  # type: ignore[arg-type]


@pytest.fixture
def inputs(seed: int) -> dict[str, Tensor]:
    return mixed_prompts([4, 9, 6], 100, seed)


@pytest.mark.parametrize("family", FAMILIES)
def test_text_alone_is_the_fast_loops(family, inputs, seed):
    plain, wrapped = pair(family, seed)
    typed = {**inputs, **types_of_text(family, inputs["input_ids"])}
    for given in (inputs, typed):
        expected = greedy(plain, given, 12)
        torch.testing.assert_close(greedy(wrapped, given, 12), expected)
    assert wrapped.compiled.stats().generate_calls == {"fast loop": 2}
    torch.testing.assert_close(greedy(wrapped, typed, 9, num_beams=2), greedy(plain, typed, 9, num_beams=2))
    assert wrapped.compiled.stats().generate_calls == {"fast loop": 2, "compiled forward": 1}
    assert_account_is_empty(wrapped)


@pytest.mark.parametrize("family", ["Gemma3", "Qwen2VL"])
def test_text_goes_on_over_a_cache(family, inputs, seed):
    answers = []
    for model in (models := pair(family, seed)):
        first = greedy(model, inputs, 6, return_dict_in_generate=True)
        ids = torch.cat([first.sequences, torch.full((3, 2), 7)], dim=1)
        mask = torch.cat([inputs["attention_mask"], torch.ones(3, 8, dtype=torch.long)], dim=1)
        given = {"input_ids": ids, "attention_mask": mask}
        answers.append(greedy(model, given, 9, past_key_values=first.past_key_values))
    torch.testing.assert_close(*answers)
    assert models[1].compiled.stats().generate_calls == {"fast loop": 2}


@pytest.mark.parametrize("family", ["Gemma3", "Qwen3VL"])
def test_a_forward_over_text_is_compiled(family, inputs, seed):
    plain, wrapped = pair(family, seed)
    typed = {**inputs, **types_of_text(family, inputs["input_ids"])}
    shown = inputs["attention_mask"].bool()
    with torch.no_grad():
        expected, logits = plain(**typed).logits, wrapped(**typed, use_cache=False).logits
    torch.testing.assert_close(logits[shown], expected[shown], rtol=1e-4, atol=1e-4)
    assert wrapped.compiled.stats().forward_calls == {"compiled": 1}


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize("family", ["Gemma3", "Qwen2VL"])
def test_text_alone_compiles_whole(family, inputs, seed):
    plain, wrapped = pair(family, seed, mode="compile")
    for _ in range(2):
        torch.testing.assert_close(greedy(wrapped, inputs, 9), greedy(plain, inputs, 9))
    stats = wrapped.compiled.stats()
    assert stats.generate_calls == {"fast loop": 2}
    assert stats.recompiles == 0
