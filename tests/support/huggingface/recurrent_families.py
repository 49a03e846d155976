"""A tiny random model of each family with recurrent layers."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from support.huggingface.families import TINY

SMALL = {**TINY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "head_dim": 8}
HYBRID = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
DELTA = {
    **HYBRID,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
ROUTED = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
CONV = {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3}
MAMBA_2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
RECURRENT: dict[str, dict[str, Any]] = {
    "Bamba": {"attn_layer_indices": [1], **MAMBA_2},
    "FalconH1": {**MAMBA_2, "mamba_n_heads": 4, "mamba_d_ssm": 32},
    "FalconMamba": {"state_size": 8},
    "GraniteMoeHybrid": {
        "layer_types": ["mamba", "attention", "mamba"],
        "num_local_experts": 0,
        "shared_intermediate_size": 48,
        **MAMBA_2,
    },
    "Jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "Lfm2": CONV,
    "Lfm2Moe": {**CONV, **ROUTED, "num_dense_layers": 1},
    "Mamba": {"state_size": 8},
    "Mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "expand": 2, "chunk_size": 8},
    "OlmoHybrid": DELTA,
    "Qwen3Next": {**DELTA, **ROUTED},
    "Qwen3_5": DELTA,
    "Qwen3_5Moe": {**DELTA, **ROUTED},
}
ALL_RECURRENT = frozenset({"FalconMamba", "Mamba", "Mamba2"})
"""Families without attention."""
CONFIGS = {"Qwen3_5": "Qwen3_5TextConfig", "Qwen3_5Moe": "Qwen3_5MoeTextConfig"}


def recurrent_model(family: str, seed: int = 0) -> PreTrainedModel:
    """In float32; its weights are large enough for states to matter."""
    config = getattr(transformers, CONFIGS.get(family, f"{family}Config"))(**{**SMALL, **RECURRENT[family]})
    torch.manual_seed(seed)
    model: PreTrainedModel = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    return model
