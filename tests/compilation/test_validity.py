"""The parts of a model that a CUDA graph has baked in are watched: each change of them is noticed, no other is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from compiled_llm.compat.torch.dynamo import own_copy
from compiled_llm.compilation.graphs.validity import Guards, Weights
from support.huggingface.vision import make
from support.tiny_models import tiny_qwen3

pytestmark = pytest.mark.core


CHANGES: dict[str, Callable[[Any], object]] = {
    "a module in a module": lambda model: setattr(
        model.model.layers[1].self_attn, "o_proj", copy.deepcopy(model.model.layers[1].self_attn.o_proj)
    ),
    "a layer less": lambda model: model.model.layers.pop(1),
    "a layer more": lambda model: model.model.layers.append(copy.deepcopy(model.model.layers[1])),
    "a buffer": lambda model: setattr(model.model.rotary_emb, "inv_freq", model.model.rotary_emb.inv_freq.clone()),
    "a tensor in an attribute": lambda model: setattr(model.model, "loose", torch.zeros(3)),
    "no tensor in an attribute": lambda model: delattr(model.model, "loose"),
    "a tensor in a list": lambda model: model.model.several.__setitem__(1, torch.zeros(3)),
    "a shorter list": lambda model: model.model.several.pop(),
    "a tensor in a dictionary": lambda model: model.model.named.update(there=torch.zeros(3)),
    "all parameters of a module": lambda model: setattr(
        model.lm_head, "_parameters", {"weight": nn.Parameter(model.lm_head.weight.detach().clone()), "bias": None}
    ),
    "all buffers of a module": lambda model: setattr(
        model.model.rotary_emb, "_buffers", {**copy.deepcopy(model.model.rotary_emb._buffers)}
    ),
    "all modules of a module": lambda model: setattr(model, "_modules", copy.deepcopy(model._modules)),
    "another dtype": lambda model: model.half(),
}
"""Those that change other tensors than ``support.execution.model_changes`` does."""


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_of_what_tensors_there_are_is_noticed(name: str) -> None:
    model: Any = tiny_qwen3()
    model.model.loose = torch.zeros(3)
    model.model.several, model.model.named = [1, torch.zeros(3)], {"there": torch.zeros(3), "nor": "this"}
    weights = Weights(model)
    assert weights.valid()
    CHANGES[name](model)
    assert not weights.valid()


def test_what_generate_notes_in_a_vision_language_model_changes_nothing() -> None:
    model = make("Qwen2VL")
    model.model.rope_deltas = torch.zeros(2, 1)
    weights = Weights(model)
    model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=1)
    assert weights.valid()


def scaled(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return inputs[0] * model.factor + (1.0 if model.training else 0.0)


@pytest.fixture
def guarded() -> tuple[nn.Module, Guards, Callable[..., torch.Tensor]]:
    model = nn.Module()
    model.factor = 2.0
    model.eval()
    function = own_copy(scaled)
    compiled = torch.compile(function, backend="eager", fullgraph=True, dynamic=False)
    inputs = (torch.ones(3),)
    with torch.no_grad():
        compiled(model, inputs)
        guards = Guards(function, {"model": model, "inputs": inputs})
        guards.find()
        return model, guards, compiled


def test_guards_hold_until_an_attribute_or_the_grad_mode_changes(guarded) -> None:
    model, guards, compiled = guarded
    with torch.no_grad():
        assert guards.valid()
        model.factor = 3.0
        assert not guards.valid()
        model.factor = 2.0
        assert guards.valid()
        model.train()
        assert not guards.valid()
        model.eval()
    assert not guards.valid()
    with torch.no_grad():
        model.factor = 3.0
        compiled(model, (torch.ones(3),))  # those of the recording stay when another graph is compiled
        assert not guards.valid()
        model.factor = 2.0
        assert guards.valid()


def test_arguments_that_nothing_was_compiled_for_are_named() -> None:
    function = own_copy(scaled)
    guards = Guards(function, {"model": nn.Module(), "inputs": ()})
    with pytest.raises(RuntimeError, match="scaled was not compiled for these arguments"):
        guards.find()
