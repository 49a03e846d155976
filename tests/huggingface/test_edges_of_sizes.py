"""At the edges of sizes a wrapped model equals HuggingFace, or refuses with one clear error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import compiled_llm
from support.parity import assert_account_is_empty, greedy, mixed_prompts
from support.tiny_models import tiny_qwen3

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("one_thread")]


def pair(max_batch_size: int = 2, page_size: int = 4, **overrides: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A tiny model, and another one that is wrapped."""
    reference, model = (tiny_qwen3(**{"num_hidden_layers": 1, "eos_token_id": None, **overrides}) for _ in range(2))
    options = {"max_batch_size": max_batch_size, "page_size": page_size, "kv_memory": "600 tokens"}
    return reference, compiled_llm.wrap(model, mode="eager", progress=False, **options)


@pytest.mark.parametrize("raised", [64, 300])
def test_positions_may_be_raised_between_calls(raised: int, seed: int) -> None:
    reference, model = pair(max_position_embeddings=16)
    greedy(model, mixed_prompts([5, 9], 128, seed), 3)
    for changed in (reference, model):
        changed.config.max_position_embeddings = raised
    inputs = mixed_prompts([5, 15], 128, seed)
    torch.testing.assert_close(greedy(model, inputs, raised - 15), greedy(reference, inputs, raised - 15))
    assert_account_is_empty(model)
    with pytest.raises(ValueError, match=f"the model has {raised} positions"):
        greedy(model, inputs, raised - 14)
    with torch.no_grad():
        long = mixed_prompts([raised], 128, seed)
        torch.testing.assert_close(model(**long).logits, reference(**long).logits, rtol=1e-4, atol=1e-4)


def test_positions_may_be_lowered_between_calls(seed: int) -> None:
    reference, model = pair(max_position_embeddings=64)
    inputs = mixed_prompts([5, 9], 128, seed)
    cache = greedy(model, inputs, 3, return_dict_in_generate=True).past_key_values
    for changed in (reference, model):
        changed.config.max_position_embeddings = 8
    torch.testing.assert_close(greedy(model, inputs, 9), greedy(reference, inputs, 9))
    assert cache.get_seq_length() == 11


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"do_sample": True}], ids=str)
def test_ids_of_no_columns_may_stand_beside_embeddings(options: dict[str, Any], seed: int) -> None:
    models, texts = pair(max_batch_size=4), []
    embeddings = torch.randn(2, 7, 64)
    for name in ("input_ids", "inputs"):
        given = {name: torch.zeros(2, 0, dtype=torch.long), "inputs_embeds": embeddings, "max_new_tokens": 5}
        for model in models:
            torch.manual_seed(seed)
            texts.append(model.generate(**given, **{"do_sample": False, **options}))
        if not options.get("do_sample"):
            torch.testing.assert_close(texts[-1], texts[-2])
    with pytest.raises(ValueError, match=r"input_ids: shape \(1, 0\) holds no token"):
        models[1].generate(torch.zeros(1, 0, dtype=torch.long), inputs_embeds=embeddings, max_new_tokens=5)
    assert_account_is_empty(models[1])
