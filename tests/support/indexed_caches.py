"""HuggingFace's caches of models whose layers keep index keys: a wrapped model and an unwrapped one fill them alike."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache

from support.parity import assert_account_is_empty, greedy, mixed_prompts

CLOSE: dict[str, float] = {"rtol": 1e-4, "atol": 1e-4}


class PlacedOnCuda:
    """What checks read of a model that is on a GPU."""

    device, dtype = torch.device("cuda:0"), torch.bfloat16


def index_keys_of(cache: Any) -> list[Tensor]:
    """`[B, C, I]` of each layer that keeps some: of single tokens, or of blocks."""
    single = [getattr(layer, "indexer_keys", None) for layer in cache.layers]
    blocks = [getattr(layer, "idx_keys", None) for layer in cache.layers]
    return [keys for keys in single if keys is not None] + [keys[:, 0] for keys in blocks if keys is not None]


def check_dynamic_caches(plain: PreTrainedModel, model: PreTrainedModel, length: int, new: int, seed: int) -> None:
    """Three turns over one cache of HuggingFace's of `new` tokens give the same tokens, and the same cache."""
    answers: list[list[Tensor]] = [[], []]
    for own, answer in zip((plain, model), answers, strict=True):
        cache = DynamicCache(config=own.config)
        prompts = mixed_prompts([length, length], 128, seed)["input_ids"]
        inputs: dict[str, Any] = {"input_ids": prompts, "pad_token_id": 0}
        for turn in range(3):
            out = greedy(own, inputs, new, past_key_values=cache)
            answer.append(out)
            inputs["input_ids"] = torch.cat([out, torch.full((2, 2), 5 + turn)], dim=1)
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])  # or tokens like padding would be hidden
        answer += [states for layer in cache.layers for states in (layer.keys, layer.values)]
        answer += index_keys_of(cache)
    for found, wanted in zip(*answers, strict=True):
        torch.testing.assert_close(found, wanted, **CLOSE)
    assert model.compiled.stats().generate_calls == {"fast loop": 3}
    assert_account_is_empty(model)


def check_static_caches(plain: PreTrainedModel, model: PreTrainedModel, length: int, seed: int) -> None:
    """A static cache gives the same tokens, by HuggingFace's own loop."""
    outs = []
    for own in (plain, model):
        inputs = {"input_ids": mixed_prompts([length], 128, seed)["input_ids"], "pad_token_id": 0}
        outs.append(greedy(own, inputs, 9, past_key_values=StaticCache(config=own.config, max_cache_len=64)))
    assert torch.equal(*outs)
    assert "fast loop" not in model.compiled.stats().generate_calls
