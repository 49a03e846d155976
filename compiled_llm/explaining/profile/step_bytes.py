"""The bytes that a decode step has to move, whichever kernels do it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class StepBytes:
    """The bytes that a decode step has to read.

    Attributes:
        weights: every weight once, but of an embedding of its own one line a row; None for experts, of which each
            step uses others.
        kv_per_row: one row's keys and values.
        kv_written: one row's new keys and values.
    """

    weights: int | None
    kv_per_row: int
    kv_written: int

    def total(self, batch: int) -> int | None:
        return None if self.weights is None else self.weights + batch * self.kv_per_row


def step_bytes(model: PreTrainedModel, context: int) -> StepBytes:
    """Return what a decode step reads at a context of that many tokens."""
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token = 2 * heads * size * model.dtype.itemsize
    read = sum(min(context, window or context) for window in _windows(config))
    experts = any(getattr(config, name, None) for name in _EXPERTS)
    return StepBytes(None if experts else _weight_bytes(model), token * read, token * config.num_hidden_layers)


def _windows(config: Any) -> list[int | None]:
    types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    window = getattr(config, "sliding_window", None)
    return [window if kind == "sliding_attention" else None for kind in types]


def _weight_bytes(model: PreTrainedModel) -> int:
    weights = {parameter.data_ptr(): parameter.nbytes for parameter in model.parameters()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    inputs: Any = getattr(embedding, "weight", None)
    if inputs is not None and getattr(head, "weight", None) is not inputs:  # tied ones are read whole by the head
        weights.pop(inputs.data_ptr(), None)
    return sum(weights.values())
