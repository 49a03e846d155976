"""The bytes that a decode step has to move, whichever kernels do it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from compiled_llm.execution.state.runner_state import RunnerState
from compiled_llm.kinds.kind import Layer
from compiled_llm.kvcache.specs import token_bytes

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class StepBytes:
    """The bytes that a decode step has to read."""

    # every weight once, but of an embedding of its own one line a row; None for experts, of which each step uses others
    weights: int | None
    kv_per_row: int  # one row's keys and values
    kv_written: int  # one row's new keys and values

    def total(self, batch: int) -> int | None:
        return None if self.weights is None else self.weights + batch * self.kv_per_row


def step_bytes(model: PreTrainedModel, context: int, state: RunnerState | None = None) -> StepBytes:
    """Return what a decode step reads at that context, with keys and values as in ``state``, or as configured."""
    config = model.config.get_text_config(decoder=True)
    layers = _layers_of_config(model, config) if state is None else _layers_of_pages(state)
    read = sum(token * (context if window is None else min(context, window)) for token, window in layers)
    experts = any(getattr(config, name, None) for name in _EXPERTS)
    return StepBytes(None if experts else _weight_bytes(model), read, sum(token for token, _ in layers))


def prepared_bytes(layers: Sequence[Layer], dtype: torch.dtype) -> int:
    """Return the bytes that norm, rotary embedding and page append of one token move, where they are one kernel."""
    # Queries, keys and values are read and written, cos and sin are read; the columns that fill up pages are left
    # alone. Weights of norms are read once for all tokens, and ``StepBytes.weights`` has them.
    heads = [(2 * layer.query_heads + 4 * layer.kv_heads + 2) * layer.head_dim for layer in layers]
    return sum(heads) * dtype.itemsize


def _layers_of_pages(state: RunnerState) -> list[tuple[int, int | None]]:
    """Return each layer's bytes of a token, and its window, if it has one."""
    windows = [None if layer.window_left < 0 else layer.window_left + 1 for layer in state.facts.layers]
    return [
        (token_bytes(spec), window)
        for spec, window in zip(state.specs, itertools.chain(windows, itertools.repeat(None)), strict=False)
    ]


def _layers_of_config(model: PreTrainedModel, config: Any) -> list[tuple[int, int | None]]:
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return [(2 * heads * size * model.dtype.itemsize, window) for window in _windows(config)]


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
