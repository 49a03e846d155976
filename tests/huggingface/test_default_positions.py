"""`model(...)` without `position_ids`: whatever a family numbers then, it gives HuggingFace's logits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import compiled_llm
from support.huggingface.families import make
from support.parity import assert_account_is_empty, greedy, mixed_prompts

OPTIONS: dict[str, Any] = {"mode": "eager", "page_size": 4, "kv_memory": "4000 tokens", "progress": False}
FAMILIES: dict[str, tuple[dict[str, Any], str]] = {
    "Roberta": ({"is_decoder": True}, "own"),
    "BioGpt": ({}, "columns"),
    "OPT": ({"ffn_dim": 96, "word_embed_proj_dim": 64}, "unmasked"),
    "Llama": ({}, "columns"),
}


@pytest.fixture(scope="module", params=FAMILIES)
def models(request: pytest.FixtureRequest) -> tuple[PreTrainedModel, PreTrainedModel, str]:
    """The same model twice, the first one unwrapped, and what it numbers."""
    options, numbered = FAMILIES[request.param]
    plain, wrapped = (make(request.param, options, 0) for _ in range(2))
    return plain, compiled_llm.wrap(wrapped, **OPTIONS), numbered


def logits(model: PreTrainedModel, **inputs: Any) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(**inputs).logits
    return result


@pytest.mark.core
def test_logits_and_tokens_without_positions_are_huggingfaces(models, seed):
    plain, wrapped, numbered = models
    left = mixed_prompts([9, 4], 128, seed)
    holes = copy.deepcopy(left)
    holes["attention_mask"][0, 3:5] = 0
    right = {name: value.flip(1) for name, value in left.items()}
    everything = {"input_ids": left["input_ids"]}
    counted = (left["attention_mask"].cumsum(1) - 1).clamp(min=0)
    wrapped.compiled.counters.forward_calls.clear()
    for inputs in (left, holes, right, everything, {**left, "position_ids": counted}):
        shown = inputs.get("attention_mask", torch.ones_like(left["input_ids"])).bool()
        torch.testing.assert_close(logits(wrapped, **inputs)[shown], logits(plain, **inputs)[shown])
    assert wrapped.compiled.facts.default_positions == numbered
    expected = {"original": 4, "compiled": 1} if numbered == "own" else {"compiled": 5}
    assert wrapped.compiled.stats().forward_calls == expected
    for options in ({}, {"num_beams": 2}, {"no_repeat_ngram_size": 2}):  # all of generate gives positions
        torch.testing.assert_close(greedy(wrapped, left, 8, **options), greedy(plain, left, 8, **options))
    assert wrapped.compiled.stats().generate_calls.keys() == {"fast loop", "compiled forward", "processed loop"}
    assert_account_is_empty(wrapped)


def test_a_copy_knows_what_its_model_numbers(models, seed):
    plain, wrapped, numbered = models
    twin, inputs = copy.deepcopy(wrapped), mixed_prompts([9, 4], 128, seed)
    assert twin.compiled.facts.default_positions == numbered
    shown = inputs["attention_mask"].bool()
    torch.testing.assert_close(logits(twin, **inputs)[shown], logits(plain, **inputs)[shown])


def test_pages_are_refused_without_positions_that_they_need(seed):
    model = compiled_llm.wrap(make("Roberta", FAMILIES["Roberta"][0], 0), **OPTIONS)
    cache, inputs = model.compiled.new_cache(), mixed_prompts([5], 128, seed)
    with pytest.raises(ValueError, match="no position_ids are given"):
        logits(model, **inputs, past_key_values=cache)
    positions = torch.arange(5)[None]
    assert logits(model, **inputs, past_key_values=cache, position_ids=positions).shape == (1, 5, 128)
