"""Tiny random models of sparse latent attention, whose indexers choose the tokens that each query reads."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from packaging.version import Version
from transformers import PreTrainedModel

from support.latent_models import latent_model

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


def indexed_model(case: str = "DeepseekV32", seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A model in float32.

    No token is padding: its embedding would be zeros, so that its queries scored all keys alike. With few heads, keys
    that no head likes score alike, too, and HuggingFace takes any of them.
    """
    family, options = FAMILIES[case]
    indexer = {"index_topk": TOP, "index_n_heads": 32, "index_head_dim": INDEX}
    sizes = {"pad_token_id": None, "max_position_embeddings": 128}
    return latent_model(family, seed, **{**indexer, **sizes, **options, **overrides})
