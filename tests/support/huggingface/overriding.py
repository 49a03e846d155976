"""What users override in a model; each change returns what takes it back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from support.huggingface.cache_name import CACHE

BIAS = torch.linspace(0, 6, 128)
Undo = Callable[[], None]
INPUTS, KWARGS = "prepare_inputs_for_generation", "_update_model_kwargs_for_generation"


def shifted(inputs: Any) -> Any:
    """Each step is given the ids after those that were sampled."""
    return {**inputs, "input_ids": (inputs["input_ids"] + 1) % 128}


def a_position_further(inputs: Any) -> Any:
    return {**inputs, "position_ids": inputs["position_ids"] + 1}


def biased(output: Any) -> Any:
    output.logits = output.logits + BIAS.to(output.logits.device)
    return output


def on_object(name: str, change: Callable[[Any], Any]) -> Callable[[PreTrainedModel], Undo]:
    """Override a method of the object: ``change`` is applied to what the original returns."""

    def override(model: PreTrainedModel) -> Undo:
        original = getattr(model, name)

        @functools.wraps(original)
        def own(*given: Any, **named: Any) -> Any:
            return change(original(*given, **named))

        return replace(model, name, own)

    return override


def in_class(name: str, change: Callable[[Any], Any]) -> Callable[[PreTrainedModel], None]:
    """Override a method in a class of the model's own."""

    def override(model: PreTrainedModel) -> None:
        original = getattr(type(model), name)

        @functools.wraps(original)
        def own(self: Any, *given: Any, **named: Any) -> Any:
            return change(original(self, *given, **named))

        model.__class__ = type("Mine", (type(model),), {name: own})

    return override


shift_ids, skip_positions = on_object(INPUTS, shifted), on_object(KWARGS, a_position_further)
prefer_tokens = on_object("forward", biased)


def embed_prompt(model: PreTrainedModel) -> Undo:
    """The prompt comes as embeddings, as PEFT's learned prompts do."""

    def embedded(inputs: Any) -> Any:
        if (cache := inputs.get(CACHE)) is not None and cache.get_seq_length():
            return inputs
        embeddings: Tensor = model.get_input_embeddings()(inputs["input_ids"]).roll(1, dims=-1)
        return {**inputs, "input_ids": None, "inputs_embeds": embeddings}

    return on_object(INPUTS, embedded)(model)


def ask_for_hidden_states(model: PreTrainedModel) -> Undo:
    """Every forward has them among its results."""
    model.config.output_hidden_states = True
    return lambda: setattr(model.config, "output_hidden_states", False)


def replace(model: PreTrainedModel, name: str, own: Any) -> Undo:
    """Set an attribute of the object that hides one of its class."""
    setattr(model, name, own)
    return lambda: delattr(model, name)
