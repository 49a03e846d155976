"""The models that are measured: what `compiled-llm generate` takes, or random weights in a known shape."""

from __future__ import annotations

import io
import json
import sys
from contextlib import AbstractContextManager, nullcontext, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, Qwen3Config

from compiled_llm.loading import load

_QWEN3 = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 512,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
    },
    "qwen3-0.6b": {
        **_QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        **_QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
}
"""Qwen3 shapes for random weights; `tiny` runs anywhere, and says nothing about speed."""

_ROPE_THETA = 1e6
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def is_random(name: str) -> bool:
    """Whether the model's weights are made up."""
    return name in SHAPES


def build(name: str, device: torch.device, dtype: torch.dtype, seed: int = 0) -> PreTrainedModel:
    """Return a model that never stops by itself, in evaluation mode.

    Args:
        name: a key of ``SHAPES``, or what ``loading.load`` takes.
        device: where it is made.
        dtype: of its weights.
        seed: of random weights.
    """
    if is_random(name):
        model = _random(SHAPES[name], device, dtype, seed)
    else:
        with _quiet():
            model, _ = load(name, dtype, device)
    model.config.eos_token_id = None
    model.generation_config = GenerationConfig(pad_token_id=0)
    model.eval()
    return model


def _quiet() -> AbstractContextManager[object]:
    """Where stderr is no terminal, loading says each thing it does in a line."""
    return nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO())


def _random(shape: dict[str, Any], device: torch.device, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    rope = {"rope_type": "default", "rope_theta": _ROPE_THETA}
    config = Qwen3Config(**shape, rope_parameters=rope, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    torch.manual_seed(seed)
    with device:
        return cast(PreTrainedModel, AutoModelForCausalLM.from_config(config, dtype=dtype))


def write_config(name: str, dtype: torch.dtype, folder: Path) -> None:
    """Write the ``config.json`` of random weights, as other engines read it."""
    shape = SHAPES[name]
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "rope_theta": _ROPE_THETA,
        "rope_scaling": None,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": shape["num_hidden_layers"],
        "torch_dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": 1,
        "eos_token_id": 2,
        **shape,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def most_positions(model: PreTrainedModel) -> int | None:
    """Return how many tokens a row of the model can have, if it says."""
    return getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)


@dataclass(frozen=True)
class StepBytes:
    """What a decode step has to read.

    Attributes:
        weights: every weight once, but of an embedding of its own one line a row; None for experts, of which each
            step chooses others.
        kv_per_row: one row's keys and values.
        kv_written: one row's new keys and values.
    """

    weights: int | None
    kv_per_row: int
    kv_written: int

    def total(self, batch: int) -> int | None:
        """Bytes that a step of ``batch`` rows reads."""
        return None if self.weights is None else self.weights + batch * self.kv_per_row


def step_bytes(model: PreTrainedModel, context: int) -> StepBytes:
    """Return what a decode step reads at a context of so many tokens."""
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token = 2 * heads * size * model.dtype.itemsize
    read = sum(min(context, window or context) for window in _windows(config))
    experts = any(getattr(config, name, None) for name in _EXPERTS)
    return StepBytes(None if experts else _weight_bytes(model), token * read, token * config.num_hidden_layers)


def _windows(config: Any) -> list[int | None]:
    """The sliding window of each layer, or None."""
    types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    window = getattr(config, "sliding_window", None)
    return [window if kind == "sliding_attention" else None for kind in types]


def _weight_bytes(model: PreTrainedModel) -> int:
    weights = {parameter.data_ptr(): parameter.nbytes for parameter in model.parameters()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    inputs: Any = getattr(embedding, "weight", None)
    if inputs is not None and (head is None or head.weight is not inputs):  # tied ones are read whole by the head
        weights.pop(inputs.data_ptr(), None)
    return sum(weights.values())
