"""What a CUDA graph has baked in of a model is watched: every way to change it is noticed, and nothing else is."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from compiled_llm.compat.torch.dynamo import own_copy
from compiled_llm.compilation.graphs.validity import Guards, Weights
from support.huggingface.vision import make
from support.tiny_models import tiny_qwen3

pytestmark = pytest.mark.core


def replace_parameter(model: nn.Module) -> None:
    layer = model.model.layers[1].mlp.down_proj
    layer.weight = nn.Parameter(layer.weight.detach().clone())


def point_elsewhere(model: nn.Module) -> None:
    weight = model.model.layers[0].self_attn.q_proj.weight
    weight.data = weight.data.clone()


def swap_module(model: nn.Module) -> None:
    model.model.layers[0].mlp = copy.deepcopy(model.model.layers[0].mlp)


def swap_inner_module(model: nn.Module) -> None:
    model.model.layers[1].self_attn.o_proj = copy.deepcopy(model.model.layers[1].self_attn.o_proj)


def drop_layer(model: nn.Module) -> None:
    del model.model.layers[1]


def add_layer(model: nn.Module) -> None:
    model.model.layers.append(copy.deepcopy(model.model.layers[1]))


def replace_buffer(model: nn.Module) -> None:
    rotary = model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq.clone()


def replace_tensor(model: nn.Module) -> None:
    model.model.loose = torch.zeros(3)


def remove_tensor(model: nn.Module) -> None:
    del model.model.loose


def replace_in_list(model: nn.Module) -> None:
    model.model.several[1] = torch.zeros(3)


def replace_in_dict(model: nn.Module) -> None:
    model.model.named["there"] = torch.zeros(3)


def shorten_list(model: nn.Module) -> None:
    model.model.several.pop()


def exchange_parameters(model: nn.Module) -> None:
    model.lm_head._parameters = {"weight": nn.Parameter(model.lm_head.weight.detach().clone()), "bias": None}


def exchange_buffers(model: nn.Module) -> None:
    rotary = model.model.rotary_emb
    rotary._buffers = {name: buffer.clone() for name, buffer in rotary._buffers.items()}


def exchange_modules(model: nn.Module) -> None:
    model._modules = {name: copy.deepcopy(module) for name, module in model._modules.items()}


def convert(model: nn.Module) -> None:
    model.half()


def hand_over(model: nn.Module) -> None:
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)


CHANGES = [
    replace_parameter,
    point_elsewhere,
    swap_module,
    swap_inner_module,
    drop_layer,
    add_layer,
    replace_buffer,
    replace_tensor,
    remove_tensor,
    replace_in_list,
    replace_in_dict,
    shorten_list,
    exchange_parameters,
    exchange_buffers,
    exchange_modules,
    convert,
    hand_over,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_every_change_of_what_tensors_there_are_is_noticed(change: Callable[[nn.Module], None]) -> None:
    model = tiny_qwen3()
    model.model.loose = torch.zeros(3)
    model.model.several, model.model.named = [1, torch.zeros(3)], {"there": torch.zeros(3), "nor": "this"}
    weights = Weights(model)
    assert weights.valid()
    change(model)
    assert not weights.valid()


def test_what_changes_in_place_is_read_where_it_lies() -> None:
    model = tiny_qwen3()
    weights = Weights(model)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    model.load_state_dict(tiny_qwen3(seed=7).state_dict())
    model.train()
    assert weights.valid()


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
    model, guards, _ = guarded
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


def test_guards_stay_those_of_the_recording_when_another_graph_is_compiled(guarded) -> None:
    model, guards, compiled = guarded
    with torch.no_grad():
        model.factor = 3.0
        compiled(model, (torch.ones(3),))
        assert not guards.valid()
        model.factor = 2.0
        assert guards.valid()


def test_arguments_that_nothing_was_compiled_for_are_named() -> None:
    function = own_copy(scaled)
    guards = Guards(function, {"model": nn.Module(), "inputs": ()})
    with pytest.raises(RuntimeError, match="scaled was not compiled for these arguments"):
        guards.find()
