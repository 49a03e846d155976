"""A tiny Llama whose values have heads of another size than its keys; families with such values cache latents."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb, eager_attention_forward

from support.tiny_models import TINY, randomised

VALUE_DIM = 12
"""Of the values; keys have 16."""


class UnevenAttention(LlamaAttention):
    def __init__(self, config: LlamaConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.v_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * VALUE_DIM, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * VALUE_DIM, config.hidden_size, bias=False)

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        shape = hidden_states.shape[:-1]
        query = self.q_proj(hidden_states).view(*shape, -1, self.head_dim).transpose(1, 2)
        key = self.k_proj(hidden_states).view(*shape, -1, self.head_dim).transpose(1, 2)
        value = self.v_proj(hidden_states).view(*shape, -1, VALUE_DIM).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if (kept := past_key_values if cache is None else cache) is not None:  # its name since transformers 5.24
            key, value = kept.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        out, weights = attend(self, query, key, value, attention_mask, scaling=self.scaling, **kwargs)
        return self.o_proj(out.reshape(*shape, -1)), weights


class UnevenLlama(LlamaForCausalLM):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        for number, layer in enumerate(self.model.layers):
            layer.self_attn = UnevenAttention(config, number)
        self.post_init()


def uneven_llama(seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random model in float32; it goes on for ever."""
    config = LlamaConfig(**{**TINY, "eos_token_id": None, **overrides})
    model: PreTrainedModel = randomised(UnevenLlama, config, seed)
    return model
