"""Families beside Qwen3 and Llama: the same tokens as HuggingFace, or a refusal that says why."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import compiled_llm
from support.huggingface.families import FAMILIES, MIXTURES, make
from support.parity import assert_account_is_empty, greedy, mixed_prompts


@torch.no_grad()
def scores(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """The logits of a call of the model itself."""
    logits: Tensor = model(ids).logits
    return logits


@pytest.mark.parametrize("mode", ["eager", pytest.param("compile", marks=[pytest.mark.slow, pytest.mark.whole])])
@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=[pytest.mark.whole] * (family in MIXTURES)) for family in FAMILIES]
)
@pytest.mark.core
def test_tokens_equal_huggingface(family, mode, seed):
    """Those with experts have tests of their own, some of them in each run: `experts`."""
    model = make(family, FAMILIES[family], seed)
    inputs = mixed_prompts([5, 19, 11], 128, seed)
    expected, ids = greedy(model, inputs, 8), inputs["input_ids"][1:2]  # of a row without padding
    logits = scores(model, ids)
    assert len(set(expected[0, 19:].tolist())) > 3, "text that repeats one token shows little"
    compiled_llm.wrap(model, mode=mode, page_size=4, progress=False)
    for _ in range(2):
        torch.testing.assert_close(greedy(model, inputs, 8), expected)
    torch.testing.assert_close(scores(model, ids), logits, rtol=1e-4, atol=1e-4)
    stats = model.compiled.stats()
    assert stats.generate_calls == {"fast loop": 2}
    assert stats.recompiles == 0
    assert_account_is_empty(model)


def test_experts_of_a_layer_that_was_replaced_by_a_copy_are_wrapped(seed):
    """The copy has a config of its own, which says how its experts compute."""
    plain, wrapped = (make("Qwen3Moe", FAMILIES["Qwen3Moe"], 0) for _ in range(2))
    wrapped.model.layers[0] = copy.deepcopy(wrapped.model.layers[0])
    compiled_llm.wrap(wrapped, mode="eager", progress=False)
    inputs = mixed_prompts([5, 3], 128, seed)
    assert torch.equal(greedy(wrapped, inputs, 5), greedy(plain, inputs, 5))
