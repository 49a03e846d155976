"""Tiny models whose layers are of other kinds than attention over all keys, for batch-invariant engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from support.huggingface.recurrent_families import RECURRENT, recurrent_model
from support.latent_models import WITHOUT_EXPERTS, latent_model

WHOLE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 128,
    "eos_token_id": None,
}
"""Sizes that fill vectors of the processor: without Inductor, PyTorch computes what does not in another way."""
DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
MAMBA_2: dict[str, Any] = {"mamba_n_heads": 32, "mamba_d_head": 8, "mamba_d_state": 32}
CONV: dict[str, Any] = {"layer_types": ["conv", "full_attention"]}
FAMILIES: dict[str, dict[str, Any]] = {
    "Bamba": {**MAMBA_2, "attn_layer_indices": [1], "hidden_size": 128},
    "FalconH1": {**MAMBA_2, "num_hidden_layers": 1, "mamba_d_ssm": 256},
    "GraniteMoeHybrid": {**MAMBA_2, "layer_types": ["mamba", "attention"], "hidden_size": 128},
    "Lfm2": CONV,
    "Lfm3": {**CONV, "num_attention_heads": 32, "num_key_value_heads": 16},  # it has a gate of a number for each head
    "Mamba2": {"num_hidden_layers": 1, "hidden_size": 128, "state_size": 32, "num_heads": 32, "head_dim": 8},
    "OlmoHybrid": DELTA,
    "Qwen3_5": DELTA,
}
"""Families with recurrent layers whose models multiply by linear layers alone."""


LATENTS: dict[str, Any] = {
    **WITHOUT_EXPERTS,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 64,
    "head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}


def _recurrent(family: str) -> Callable[[int], PreTrainedModel]:
    return lambda seed: recurrent_model(family, seed, **{**WHOLE, **FAMILIES[family]})


def _latents(seed: int) -> PreTrainedModel:
    return latent_model(seed=seed, **LATENTS)


KINDS: dict[str, Callable[[int], PreTrainedModel]] = {
    **{family: _recurrent(family) for family in FAMILIES if family in RECURRENT},
    **({"latents": _latents} if hasattr(DeepseekV3Attention, "expand_kv") else {}),
}
