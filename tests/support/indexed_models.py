"""Tiny random models of sparse latent attention, whose indexers choose the tokens that each query reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import PreTrainedModel

from support.latent_models import LATENT, latent_model
from support.tiny_models import randomised

TOP, INDEX = 8, 16
"""Tokens that a query reads, and the size of index keys."""

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepseekV32": ("DeepseekV32", {}),
    "GlmMoeDsa": ("GlmMoeDsa", {}),
    "AXK2": ("AXK2", {}),
    "HYV4": ("HYV4", {}),
    "GlmMoeDsa, shared choices": ("GlmMoeDsa", {"indexer_types": ["full", "shared", "full"]}),
}

needs_indexers = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.18"),
    reason="transformers before 5.18 has no models whose indexers choose among latents",
)


BLOCK = 8
"""Tokens of a block of MiniMax-M3; a query reads three of them."""

BLOCKS: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 32,
    "dense_intermediate_size": 64,
    "shared_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rotary_dim": 8,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_block_size": BLOCK,
    "index_topk_blocks": 3,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": None,
}


class PlacedOnCuda:
    """What checks read of a model that is on a GPU."""

    device, dtype = torch.device("cuda:0"), torch.bfloat16


needs_blocks = pytest.mark.skipif(
    not hasattr(transformers, "MiniMaxM3VLForCausalLM"),
    reason="this version of transformers has no model whose indexers choose blocks",
)


def model_with_other_latents(seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Mistral Large 4 with an image tower; latents of layers without rotary embedding have no rotated part."""
    sizes = {name: value for name, value in LATENT.items() if name != "q_lora_rank"}
    indexer = {"index_topk": TOP, "index_n_heads": 32, "index_head_dim": INDEX}
    text = {"model_type": "mistral_large4_text", **sizes, **indexer, "no_rope_layers": [1, 1, 1], **overrides}
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "pad_token_id": None}
    tower = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    tower |= {"model_type": "pixtral", "patch_size": 8, "image_size": 32}  # type: ignore[dict-item]
    config = transformers.MistralLarge4Config(text_config=text, vision_config=tower, image_token_index=120)
    model: PreTrainedModel = randomised(transformers.MistralLarge4ForConditionalGeneration, config, seed)
    return model


def block_model(seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """MiniMax-M3's text model in float32; it goes on for ever."""
    config = transformers.MiniMaxM3VLTextConfig(**{**BLOCKS, **overrides})
    model: PreTrainedModel = randomised(transformers.MiniMaxM3VLForCausalLM, config, seed)
    return model


def indexed_model(case: str = "DeepseekV32", seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A model in float32.

    No token is padding: its embedding would be zeros, so that its queries scored all keys alike. With few heads, keys
    that no head likes score alike, too, and HuggingFace takes any of them.
    """
    family, options = FAMILIES[case]
    indexer = {"index_topk": TOP, "index_n_heads": 32, "index_head_dim": INDEX}
    sizes = {"pad_token_id": None, "max_position_embeddings": 128}
    return latent_model(family, seed, **{**indexer, **sizes, **options, **overrides})
