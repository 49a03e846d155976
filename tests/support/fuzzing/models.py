"""Random tiny models: the family, and the sizes in which families differ."""

from __future__ import annotations

from random import Random
from typing import Any

from support.huggingface.families import FAMILIES

NAMES = ("Qwen3", "Llama", *FAMILIES)
PLAIN_HEADS = frozenset(
    ["GPT2LMHead", "GPTBigCode", "GPTNeoX", "Helium", "OPT", "Olmo", "Persimmon", "Phi", "Phi3", "Qwen2", "Starcoder2"]
)
"""Whose head size is that of a hidden state divided by heads."""

CAPPED = frozenset(["Gemma2"])
"""Whose soft caps only HuggingFace's eager attention has; before transformers 5.21 others left them out."""


def random_family(random: Random) -> str:
    """The two that most tests use as often as all others together."""
    return random.choice(NAMES[:2]) if random.random() < 0.3 else random.choice(NAMES)


def random_config(random: Random, family: str) -> dict[str, Any]:
    """Settings over ``support.huggingface.families.TINY``."""
    config = {**FAMILIES.get(family, {}), **_heads(random, family)}
    layers = random.choice((1, 2, 2, 3))
    config["n_layer" if "n_layer" in config else "num_hidden_layers"] = layers
    config["n_positions" if "n_positions" in config else "max_position_embeddings"] = random.choice((48, 64, 256, 256))
    config["vocab_size"] = random.choice((40, 97, 128, 200))
    config["tie_word_embeddings"] = random.random() < 0.3
    config["eos_token_id"] = random.choice((None, None, 2, [2, 7, 11], list(range(2, 20))))
    if "sliding_window" in config:
        config["sliding_window"] = random.choice((2, 3, 5, 8, 13, 40))
    if family == "Gemma2":
        config["attn_logit_softcapping"] = random.choice((None, 2.0, 50.0))
        config["final_logit_softcapping"] = random.choice((None, 3.0, 30.0))
    return config


def _heads(random: Random, family: str) -> dict[str, Any]:
    kv, group = random.choice((1, 2, 3)), random.choice((1, 1, 2, 3, 4))
    heads, size = kv * group, random.choice((8, 16, 24))
    if "n_head" in FAMILIES.get(family, {}):
        return {"n_head": heads, "n_embd": heads * size}
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv, "hidden_size": heads * size}
    if family == "OPT":
        return {**sizes, "word_embed_proj_dim": heads * size}
    head_dim = size if family in PLAIN_HEADS else random.choice((8, 16, 20, 32))
    more = {"query_pre_attn_scalar": head_dim} if family in ("Gemma2", "Gemma3") else {}
    return {**sizes, "head_dim": head_dim, **more}
