"""The shapes of the models of published runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class Shape(NamedTuple):
    """A config of transformers: the type of the model, and what differs from the defaults of that type."""

    model_type: str
    options: dict[str, Any]

    def config(self) -> PreTrainedConfig:
        from transformers import AutoConfig  # here, so that --help is quick

        ids: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
        return AutoConfig.for_model(self.model_type, **{**ids, **self.options})


def _qwen3(width: int, inner: int, layers: int, heads: int, tied: bool, **other: int) -> Shape:
    options = {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 40960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        **other,
    }
    return Shape("qwen3", options)


_DEEPSEEK_V2_LITE = {
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "first_k_dense_replace": 1,
    "num_experts_per_tok": 6,
    "max_position_embeddings": 32768,
}
SHAPES = {
    "tiny": _qwen3(64, 128, 2, 4, True, num_key_value_heads=2, head_dim=16, vocab_size=512),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, False),
    "qwen3.5-9b": Shape("qwen3_5_text", {}),
    "qwen3.5-35b-a3b": Shape("qwen3_5_moe_text", {}),
    "qwen3.5-35b-a3b-half": Shape("qwen3_5_moe_text", {"num_hidden_layers": 20}),
    "glm-4.7-flash": Shape("glm4_moe_lite", {}),
    "deepseek-v2-lite": Shape("deepseek_v2", _DEEPSEEK_V2_LITE),
}
"""By dense attention, recurrent layers and latents; `tiny` runs anywhere, and says nothing about speed.

35B-A3B leaves no memory for pages on a GPU of 80 GB; half of its layers are as fast each.
"""
