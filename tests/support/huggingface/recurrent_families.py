"""A tiny random model of each family with recurrent layers."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from support.huggingface.families import LATENTS, TINY

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
OF_CHANNELS = {
    **HYBRID,
    **LATENTS,
    "q_lora_rank": None,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
}
"""Delta attention with a decay of each channel, beside latent attention."""
KNOWN: dict[str, dict[str, Any]] = {
    "BailingHybrid": {**OF_CHANNELS, "layer_group_size": 2, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0},
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
    "KimiLinear": {**OF_CHANNELS, "mlp_layer_types": ["dense", "sparse", "sparse"], "n_shared_experts": 1},
    "Lfm2": CONV,
    "Lfm2Moe": {**CONV, **ROUTED, "num_dense_layers": 1},
    "Mamba": {"state_size": 8},
    "Mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "expand": 2, "chunk_size": 8},
    "Lfm3": CONV,
    "NemotronH": {
        "layers_block_type": ["linear_attention", "full_attention", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 8,
    },
    "OlmoHybrid": DELTA,
    "Qwen3Next": {**DELTA, **ROUTED},
    "Qwen3_5": DELTA,
    "Qwen3_5Moe": {**DELTA, **ROUTED},
}
RECURRENT = {family: options for family, options in KNOWN.items() if hasattr(transformers, f"{family}ForCausalLM")}
"""Those of the installed version."""
WITH_EXPERTS: dict[str, dict[str, Any]] = {
    "BailingHybrid": {},
    "GraniteMoeHybrid": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Jamba": {"num_experts": 4, "num_experts_per_tok": 2},
    "KimiLinear": {},
    "Lfm2Moe": {},
    "NemotronH": {
        "layers_block_type": ["linear_attention", "full_attention", "moe"],
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16,
        "n_group": 1,
        "topk_group": 1,
    },
    "Qwen3Next": {},
    "Qwen3_5Moe": {},
}
"""What makes families mixtures of experts, of those that can be."""
ALL_RECURRENT = frozenset({"FalconMamba", "Mamba", "Mamba2"})
"""Families without attention."""
CONFIGS = {"Qwen3_5": "Qwen3_5TextConfig", "Qwen3_5Moe": "Qwen3_5MoeTextConfig"}


def recurrent_model(family: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """In float32; its weights are large enough for states to matter."""
    config = getattr(transformers, CONFIGS.get(family, f"{family}Config"))(
        **{**SMALL, **RECURRENT[family], **overrides}
    )
    torch.manual_seed(seed)
    model: PreTrainedModel = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    return model
