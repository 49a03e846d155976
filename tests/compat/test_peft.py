"""What we take of PEFT's LoRA layers is there: their adapters by name, and which of them act."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import C3AConfig, IA3Config, LoraConfig, RandLoraConfig, RoadConfig, VeraConfig, get_peft_model
from peft.tuners.lora import layer as lora_layers

from compiled_llm.compat.training.peft import ACTIVE, ADAPTED, acting_adapters, bases_read, by_adapter, is_lora_layer
from support.tiny_models import tiny_llama

ADAPTED_LAYERS = ["q_proj", "embed_tokens"]


@pytest.fixture
def model() -> Any:
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=ADAPTED_LAYERS)
    model = get_peft_model(tiny_llama(num_hidden_layers=1), config, "first")
    model.add_adapter("dora", LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], use_dora=True))
    return model


def layers_of(model: Any) -> dict[str, Any]:
    found = {name.rpartition(".")[2]: module for name, module in model.named_modules() if is_lora_layer(module)}
    assert sorted(found) == sorted(ADAPTED_LAYERS)
    return found


def test_every_dictionary_of_a_layer_that_has_an_adapter_is_known(model: Any) -> None:
    """But that of weights which variants keep frozen, which no forward reads."""
    for layer in layers_of(model).values():
        held = {**vars(layer), **layer._modules}
        by_name = {name for name, value in held.items() if hasattr(value, "keys") and "first" in value}
        assert by_name
        assert by_name <= {*by_adapter(layer)}
        assert ACTIVE in vars(layer)
        assert layer._modules[ADAPTED] is layer.get_base_layer()


def test_adapters_act_as_long_as_a_layer_adds_what_they_give(model: Any) -> None:
    layers = layers_of(model)

    def acting() -> list[Any]:
        return [acting_adapters(layers[name]) for name in ADAPTED_LAYERS]

    assert acting() == [["first"], ["first"]]
    model.base_model.set_adapter(["first", "dora"])
    assert acting() == [None, ["first"]]
    model.set_adapter("dora")
    assert acting() == [None, []]
    model.set_adapter("first")
    model.merge_adapter()
    assert acting() == [[], []]
    with model.disable_adapter():
        assert acting() == [None, None]
    model.unmerge_adapter()
    with model.disable_adapter():
        assert acting() == [[], []]


def test_layers_that_change_what_they_adapt_are_left_alone() -> None:
    assert {"ParamWrapper", "MultiheadAttention"} <= {*vars(lora_layers)}


LAYER = {"target_modules": ["q_proj"]}
CALL_THEIR_BASE = [
    *(
        LoraConfig(**LAYER),
        LoraConfig(**LAYER, use_rslora=True),
        RandLoraConfig(r=4, **LAYER),
        VeraConfig(r=4, **LAYER),
    ),
    *(RoadConfig(**LAYER), IA3Config(**LAYER, feedforward_modules=[])),
]
READ_THEIR_BASE = [
    *(LoraConfig(**LAYER, use_dora=True), IA3Config(**LAYER, feedforward_modules=["q_proj"])),
    C3AConfig(block_size=8, **LAYER),
]


@pytest.mark.parametrize("config", CALL_THEIR_BASE, ids=lambda config: str(config.peft_type))
def test_adapters_that_call_their_base_alone_read_nothing_of_it(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = tiny_llama(num_hidden_layers=1)
    get_peft_model(model, config).eval()
    assert not [*bases_read(model)]
    adapter = model.model.layers[0].self_attn.q_proj
    base = adapter.get_base_layer()
    expected = adapter(torch.ones(1, 2, base.in_features))
    weight = base._parameters.pop("weight")
    monkeypatch.setattr(base, "forward", lambda input: torch.nn.functional.linear(input, weight, base.bias))
    assert torch.equal(adapter(torch.ones(1, 2, base.in_features)), expected)


@pytest.mark.parametrize("config", READ_THEIR_BASE, ids=lambda config: str(config.peft_type))
def test_all_others_may_read_their_base(config: Any) -> None:
    model: Any = tiny_llama(num_hidden_layers=1)
    get_peft_model(model, config)
    adapter = model.model.layers[0].self_attn.q_proj
    assert [*bases_read(model)] == [(adapter.get_base_layer(), adapter)]


def test_a_merged_adapter_that_is_disabled_will_write_its_base() -> None:
    model: Any = tiny_llama(num_hidden_layers=1)
    tuned = get_peft_model(model, LoraConfig(**LAYER))
    tuned.merge_adapter()
    assert not [*bases_read(model)]
    with tuned.disable_adapter():
        assert len([*bases_read(model)]) == 1
