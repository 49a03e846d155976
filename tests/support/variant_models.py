"""Tiny models with attention of their own, written for HuggingFace's caches, and the variants that mean the same."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb, eager_attention_forward

from support.ops.variants import FAR, registered, slopes_of
from support.tiny_models import TINY, randomised

try:
    from transformers.models.inkling import modeling_inkling as inkling
except ImportError:  # older versions
    inkling = None


class Logits(NamedTuple):
    """`[B, H, q, L]`, and how far each key is before each query `[q, L]`."""

    values: Tensor
    distance: Tensor
    keys: Tensor
    mask: Tensor

    @classmethod
    def of(cls, module: nn.Module, query: Tensor, key: Tensor, mask: Tensor, scaling: float) -> Logits:
        keys = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        length = key.shape[2]
        places = torch.arange(length, device=query.device)
        own = torch.where(mask[:, 0] == 0, places, 0).amax((0, 2))  # the last that it sees, in a static cache, too
        return cls(query @ keys.transpose(2, 3) * scaling, own[:, None] - places, keys, mask)

    def attend(self, values: Tensor, value: Tensor) -> tuple[Tensor, None]:
        return self._times(torch.softmax(values + self.mask, -1), value)

    def sum(self, weights: Tensor, value: Tensor) -> tuple[Tensor, None]:
        return self._times(weights * (self.mask == 0), value)

    def _times(self, weights: Tensor, value: Tensor) -> tuple[Tensor, None]:
        repeated = value.repeat_interleave(weights.shape[1] // value.shape[1], 1)
        return (weights.to(value.dtype) @ repeated).transpose(1, 2).contiguous(), None


def alibi(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float, **_: Any
) -> Any:
    logits = Logits.of(module, query, key, attention_mask, scaling)
    return logits.attend(logits.values - module.slopes[:, None, None] * logits.distance, value)


def sigmoid(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float, **_: Any
) -> Any:
    logits = Logits.of(module, query, key, attention_mask, scaling)
    return logits.sum(torch.sigmoid(logits.values + module.shift[:, None, None]), value)


def relative(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    rel_logits: Tensor,
    **_: Any,
) -> Any:
    logits = Logits.of(module, query, key, attention_mask, scaling)
    return logits.attend(logits.values + _inklings_bias(rel_logits, logits.distance), value)


def _inklings_bias(rel_logits: Tensor, distance: Tensor) -> Tensor:
    """Return the bias `[B, H, q, L]` of `[B, q, H, FAR]`, by Inkling's own code where this transformers has it."""
    if inkling is None:
        by_distance = rel_logits.transpose(1, 2)
        places = distance.clamp(0, FAR - 1).expand(*by_distance.shape[:2], -1, -1)
        return by_distance.gather(-1, places) * (distance < FAR)
    bank = inkling.InklingRelativeLogits(FAR, FAR).to(rel_logits)
    nn.init.eye_(bank.proj)  # so that its profiles are the logits
    queries = distance[:, 0]
    with torch.no_grad():
        bias: Tensor = bank(rel_logits, queries, queries[0] - distance[0])
    return bias


ATTENTIONS = {"dense_alibi": alibi, "dense_sigmoid": sigmoid, "dense_inkling": relative}
for _name, _attention in ATTENTIONS.items():
    AttentionInterface.register(_name, _attention)
    AttentionMaskInterface.register(_name, eager_mask)


class RelativeAttention(LlamaAttention):
    """Calls its attention with a bias for each query, head and distance, as Inkling's is before it is gathered."""

    def __init__(self, config: LlamaConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.rel_proj = nn.Linear(config.hidden_size, config.num_attention_heads * FAR, bias=False)

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
        query, key, value = (
            project(hidden_states).view(*shape, -1, self.head_dim).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if (kept := past_key_values if cache is None else cache) is not None:  # its name since transformers 5.24
            key, value = kept.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        bias = self.rel_proj(hidden_states).view(*shape, -1, FAR).float()
        out, weights = attend(self, query, key, value, attention_mask, scaling=self.scaling, rel_logits=bias, **kwargs)
        return self.o_proj(out.reshape(*shape, -1)), weights


class RelativeLlama(LlamaForCausalLM):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        for number, layer in enumerate(self.model.layers):
            layer.self_attn = RelativeAttention(config, number)
        self.post_init()


def with_attention(
    kind: str, seed: int = 0, layers: tuple[int, ...] | None = None, **overrides: Any
) -> PreTrainedModel:
    """A random model in float32 that goes on for ever, whose layers attend so: `alibi`, `sigmoid` or `inkling`.

    Others than `layers` attend as the first does with slopes of zero.
    """
    family = RelativeLlama if kind == "inkling" else LlamaForCausalLM
    model: PreTrainedModel = randomised(family, LlamaConfig(**{**TINY, "eos_token_id": None, **overrides}), seed)
    for number, layer in enumerate(model.model.layers):
        heads = model.config.num_attention_heads
        own = layers is None or number in layers
        layer.self_attn.register_buffer("slopes", slopes_of(heads) * own)
        layer.self_attn.register_buffer("shift", torch.linspace(-3, 0, heads))
    model.set_attn_implementation(f"dense_{kind}")
    return model


def variants_for(kind: str, layers: list[int] | str = "all") -> dict[str, Any]:
    """The option of `wrap` for such a model."""
    return {"variants": {registered(kind).name: layers}}
