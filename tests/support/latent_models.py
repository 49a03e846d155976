"""Tiny random models of multi-head latent attention, with the proportions of large ones."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from transformers import PreTrainedModel
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from support.tiny_models import randomised

RANK, ROPE, PLAIN, VALUE = 32, 8, 16, 12
"""Sizes of latents and their rotated part, and of the other part of keys, and of values."""

LATENT: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": RANK,
    "qk_rope_head_dim": ROPE,
    "qk_nope_head_dim": PLAIN,
    "v_head_dim": VALUE,
    "head_dim": ROPE,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 1024,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}

WITHOUT_EXPERTS: dict[str, Any] = {"num_hidden_layers": 2, "first_k_dense_replace": 2}
"""Of layers that are alike: experts take most of what tracing and compiling a model with latents does."""

YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
    "rope_theta": 10000.0,
}

needs_latents = pytest.mark.skipif(
    not hasattr(DeepseekV3Attention, "expand_kv"),
    reason="this version of transformers caches expanded keys and values, which pages then hold",
)


def latent_model(family: str = "DeepseekV3", seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A model in float32; it goes on for ever."""
    config = getattr(transformers, f"{family}Config")(**{**LATENT, **overrides})
    model: PreTrainedModel = randomised(getattr(transformers, f"{family}ForCausalLM"), config, seed)
    return model
