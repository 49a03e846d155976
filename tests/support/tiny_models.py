"""Tiny random models, in float32."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from transformers import LlamaForCausalLM as Llama, PretrainedConfig, PreTrainedModel, Qwen3ForCausalLM as Qwen3

TINY: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


WINDOWS: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
"""Options for a Qwen3 whose layers see four tokens."""


ONE_LAYER: dict[str, Any] = {"num_hidden_layers": 1, "eos_token_id": None}
"""Of models that are compiled: each layer takes its time, and what is asked does not depend on their number."""


def tiny_qwen3(seed: int = 0, **overrides: Any) -> Qwen3:
    """A random Qwen3 in float32; `eos_token_id=None` lets it go on for ever."""
    return copy_of(Qwen3, seed, overrides)


def tiny_llama(seed: int = 0, **overrides: Any) -> Llama:
    """A random Llama in float32; `eos_token_id=None` lets it go on for ever."""
    return copy_of(Llama, seed, overrides)


def copy_of(family: type[PreTrainedModel], seed: int, overrides: Mapping[str, Any]) -> Any:
    """Most tests make the same few models, and to copy one takes half of the time."""
    key = family, seed, repr(overrides)
    if key not in _made:
        _made[key] = randomised(family, family.config_class(**{**TINY, **overrides}), seed)
    return copy.deepcopy(_made[key])


_made: dict[tuple[type, int, str], PreTrainedModel] = {}


def randomised(family: type[PreTrainedModel], config: PretrainedConfig, seed: int) -> Any:
    """Large weights and uneven norms: greedy text does not loop, attention is neither flat nor a single spike."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = family(config).eval()
        for parameter in model.parameters():
            if parameter.dim() == 1:
                torch.nn.init.uniform_(parameter, 1, 2)
    return model
