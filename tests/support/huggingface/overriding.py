"""What users override in a model; each change returns what takes it back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

BIAS = torch.linspace(0, 6, 128)
Undo = Callable[[], None]


def shift_ids(model: PreTrainedModel) -> Undo:
    """Each step is given the ids after those that were sampled."""
    original = model.prepare_inputs_for_generation

    def prepare(input_ids: Tensor, **kwargs: Any) -> Any:
        inputs = original(input_ids, **kwargs)
        return {**inputs, "input_ids": (inputs["input_ids"] + 1) % 128}

    return replace(model, "prepare_inputs_for_generation", prepare)


def embed_prompt(model: PreTrainedModel) -> Undo:
    """The prompt comes as embeddings, as PEFT's learned prompts do."""
    original = model.prepare_inputs_for_generation

    def prepare(input_ids: Tensor, **kwargs: Any) -> Any:
        inputs = original(input_ids, **kwargs)
        if (cache := inputs.get("past_key_values")) is not None and cache.get_seq_length():
            return inputs
        embeddings = model.get_input_embeddings()(inputs["input_ids"]).roll(1, dims=-1)
        return {**inputs, "input_ids": None, "inputs_embeds": embeddings}

    return replace(model, "prepare_inputs_for_generation", prepare)


def skip_positions(model: PreTrainedModel) -> Undo:
    """Each step is a position further than it would be."""
    original = model._update_model_kwargs_for_generation

    def update(*args: Any, **kwargs: Any) -> Any:
        inputs = original(*args, **kwargs)
        return {**inputs, "position_ids": inputs["position_ids"] + 1}

    return replace(model, "_update_model_kwargs_for_generation", update)


def prefer_tokens(model: PreTrainedModel) -> Undo:
    """The forward has other logits."""
    original = model.forward

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        output.logits = output.logits + BIAS
        return output

    return replace(model, "forward", forward)


def ask_for_hidden_states(model: PreTrainedModel) -> Undo:
    """Every forward has them among its results."""
    model.config.output_hidden_states = True
    return lambda: setattr(model.config, "output_hidden_states", False)


def replace(model: PreTrainedModel, name: str, own: Any) -> Undo:
    """Set an attribute of the object that hides one of its class."""
    setattr(model, name, own)
    return lambda: delattr(model, name)
