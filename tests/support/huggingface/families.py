"""A tiny random model of each family beside Qwen3 and Llama."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import PreTrainedModel

TINY: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
}
GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENTS = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
SHARED = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "head_dim": 16,
    "sliding_window": 8,
    "vocab_size_per_layer_input": 128,
    "hidden_size_per_layer_input": 16,
}
"""The last two layers attend over the keys and values of the first two."""
INDEXER = {"index_topk": 8, "index_n_heads": 32, "index_head_dim": 16, "pad_token_id": None}
"""No token is padding: its queries are zeros, which score all keys alike, and HuggingFace takes any of them."""
FAMILIES: dict[str, dict[str, Any]] = {
    "AXK1": {**LATENTS, **ROUTED},
    "Arcee": {},
    "Cohere": {},
    "Cohere2": {"sliding_window": 8},
    "DeepseekV2": {**LATENTS, **ROUTED},
    "DeepseekV3": {**LATENTS, **ROUTED},
    "DeepseekV32": {**LATENTS, **ROUTED, **INDEXER},
    "Exaone4": {},
    "GPT2LMHead": GPT,
    "GPTBigCode": GPT,
    "GPTNeoX": {},
    "Gemma": {"head_dim": 16},
    "Gemma2": {
        "head_dim": 16,
        "sliding_window": 8,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 2.0,
        "attn_implementation": "eager",  # others left it out before transformers 5.21
    },
    "Gemma3n": {**SHARED, "laurel_rank": 8, "activation_sparsity_pattern": None},
    "Gemma4": {**SHARED, "global_head_dim": 32},
    "Gemma3": {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16},
    "Glm": {"head_dim": 16},
    "Glm4": {"head_dim": 16},
    "Glm4MoeLite": {**LATENTS, **ROUTED},
    "GlmMoeDsa": {**LATENTS, **ROUTED, **INDEXER},
    "GptOss": {"head_dim": 16, "sliding_window": 8, **EXPERTS},
    "Granite": {},
    "Helium": {"head_dim": 16},
    "MiniCPM3": LATENTS,
    "Ministral": {"head_dim": 16, "sliding_window": 8},
    "Mistral": {"head_dim": 16, "sliding_window": 7},
    "Mixtral": EXPERTS,
    "OPT": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "Olmo": {},
    "Olmo2": {},
    "Olmo3": {},
    "Olmoe": {"num_experts": 8, "num_experts_per_tok": 3},
    "Persimmon": {},
    "Phi": {},
    "Phi3": {},
    "Phimoe": {"sliding_window": 8, **EXPERTS},
    "Qwen2": {},
    "Qwen2Moe": {
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "Qwen3Moe": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "SeedOss": {"head_dim": 16},
    "SmolLM3": {},
    "Starcoder2": {},
    "Youtu": LATENTS,
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "Bloom": ({"n_head": 4, "n_layer": 2}, "reach the attention interface"),
    "Nemotron": ({}, "does not hand keyword arguments"),
    "StableLm": ({}, "does not hand keyword arguments"),
    "XGLM": ({"d_model": 64, "ffn_dim": 96, "num_layers": 2, "attention_heads": 4}, "reach the attention interface"),
    "MiniMax": ({}, "reach the attention interface"),
    "Llama4": (
        {"head_dim": 16, "attention_chunk_size": 8, "intermediate_size_mlp": 96, **EXPERTS},
        "layer 0 sees neither all tokens before its own nor the last ones .*query at 8 and the key at 1",
    ),
    "Moshi": (
        {"head_dim": 16, "sliding_window": 8, "ffn_dim": 96},
        "cache keeps 8 tokens of attention layer 0|does not hand keyword arguments",  # newer and older versions
    ),
    "DeepseekV4": (
        {"head_dim": 16, "sliding_window": 8, "n_routed_experts": 4, "moe_intermediate_size": 32, **EXPERTS},
        r"layer 0 keeps a DeepseekV4\w+ in HuggingFace's cache",
    ),
    "LongcatFlash": (
        {**LATENTS, "n_routed_experts": 4, "expert_ffn_hidden_size": 16, "ffn_hidden_size": 96},
        "sizes depend on numbers that only the device knows, at .*nonzero",
    ),
    "Falcon": ({}, "Falcon"),
    "Mpt": ({"d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 256}, "Mpt"),
    "Inkling": (
        {
            "head_dim": 16,
            "swa_head_dim": 16,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "layer_types": ["hybrid_sliding", "hybrid"],
            "mlp_layer_types": ["dense", "dense"],
            "sliding_window_size": 8,
            "rel_extent": 12,
            "d_rel": 4,
        },
        "passes 'position_bias' to its attention, which paged attention lacks; a variant can read",
    ),
}
"""Families that `wrap` refuses, with their settings and a part of the reason."""
LATER: dict[str, dict[str, Any]] = {
    "CodeGen": {**GPT, "n_ctx": 256, "rotary_dim": 8, "initializer_range": 0.4},
    "GPTJ": {**GPT, "rotary_dim": 8},
}
"""Families whose attention goes through the interface from transformers 5.24 on, and is refused before."""
if Version(transformers.__version__) >= Version("5.24"):
    FAMILIES |= LATER
else:
    REFUSED |= {name: (options, "2 layers, of which none reach the attention") for name, options in LATER.items()}
CONFIGS = {
    "GPT2LMHead": "GPT2Config",
    "Gemma3": "Gemma3TextConfig",
    "Gemma3n": "Gemma3nTextConfig",
    "Gemma4": "Gemma4TextConfig",
    "Inkling": "InklingTextConfig",
    "Llama4": "Llama4TextConfig",
}
CLASSES = {"GPT2LMHead": "GPT2LMHeadModel"}

MIXTURES = [family for family, options in FAMILIES.items() if any("experts_per" in name for name in options)]
"""Those with experts."""


def make(family: str, options: dict[str, Any], seed: int) -> PreTrainedModel:
    config = getattr(transformers, CONFIGS.get(family, f"{family}Config"))
    model = getattr(transformers, CLASSES.get(family, f"{family}ForCausalLM"))
    torch.manual_seed(seed)
    return model(config(**{**TINY, **options})).eval()
