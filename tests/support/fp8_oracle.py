"""HuggingFace's models with keys and values rounded as pages of fp8 round them, without pages and our attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from compiled_llm.config import KVScales
from support.ops.fp8_pages import Stored, stored


def attend_rounded(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Attend to `[B, K, L, D]` as pages would hold them; each call rounds all keys and values anew."""
    scales: KVScales = module.config.fp8_oracle
    layer: Any = module.layer_idx
    rounded = (rounded_by(key, scales.keys[layer]).read, rounded_by(value, scales.values[layer]).read)
    key, value = (states.transpose(1, 2).to(query) for states in rounded)
    return sdpa_attention_forward(module, query, key, value, *args, **kwargs)


def rounded_by(states: Tensor, scales: tuple[float, ...]) -> Stored:
    """`[B, K, L, D]` as pages hold them, `[B, L, K, D]`, on the CPU."""
    return stored(states.transpose(1, 2).cpu(), torch.tensor(scales))


AttentionInterface.register("fp8_oracle", attend_rounded)
AttentionMaskInterface.register("fp8_oracle", sdpa_mask)


def fp8_oracle(model: PreTrainedModel, scales: KVScales) -> PreTrainedModel:
    """Let a plain model round its keys and values."""
    model.set_attn_implementation("fp8_oracle")
    model.config.fp8_oracle = scales  # type: ignore[attr-defined]
    return model


def clamped_in(plain: PreTrainedModel, ids: list[int], scales: KVScales) -> int:
    """How many keys and values of a text are beyond their scales."""
    cache = DynamicCache()
    plain(torch.tensor([ids]), past_key_values=cache)
    return sum(
        rounded_by(states, of_part[number]).clamped
        for number, layer in enumerate(cache.layers)
        for states, of_part in ((layer.keys, scales.keys), (layer.values, scales.values))
    )
