"""The models that are measured: what `compiled-llm generate` takes, or random weights in a known shape."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, Qwen3Config

from compiled_llm.commands.loading.load import load

_QWEN3 = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 512,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
    },
    "qwen3-0.6b": {
        **_QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        **_QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
}
"""Qwen3 shapes for random weights; `tiny` runs anywhere, and says nothing about speed."""

_ROPE_THETA = 1e6


def is_random(name: str) -> bool:
    """Whether the model's weights are made up."""
    return name in SHAPES


def build(name: str, device: torch.device, dtype: torch.dtype, seed: int = 0) -> PreTrainedModel:
    """Return a model that never stops by itself, in evaluation mode.

    Args:
        name: a key of ``SHAPES``, or what ``loading.load`` takes.
        device: where it is made.
        dtype: of its weights.
        seed: of random weights.
    """
    if is_random(name):
        model = _random(SHAPES[name], device, dtype, seed)
    else:
        model, _ = load(name, dtype, device, progress=False)
    model.config.eos_token_id = None
    model.generation_config = GenerationConfig(pad_token_id=0)
    model.eval()
    return model


def _random(shape: dict[str, Any], device: torch.device, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    rope = {"rope_type": "default", "rope_theta": _ROPE_THETA}
    config = Qwen3Config(**shape, rope_parameters=rope, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    torch.manual_seed(seed)
    with device:
        return cast(PreTrainedModel, AutoModelForCausalLM.from_config(config, dtype=dtype))


def write_config(name: str, dtype: torch.dtype, folder: Path) -> None:
    """Write the ``config.json`` of random weights, as other engines read it."""
    shape = SHAPES[name]
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "rope_theta": _ROPE_THETA,
        "rope_scaling": None,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": shape["num_hidden_layers"],
        "torch_dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": 1,
        "eos_token_id": 2,
        **shape,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def most_positions(model: PreTrainedModel) -> int | None:
    """Return how many tokens a row of the model can have, if it says."""
    return getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
