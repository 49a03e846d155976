"""Whether a class hands back a cache that it is given with ``use_cache=False`` is seen without its layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Cache, DynamicCache, PreTrainedModel

import compiled_llm
from compiled_llm.compat.cache_names import cache_argument
from compiled_llm.model.probes.cache_probe import hands_cache_back
from compiled_llm.model.version.module_tree import ModuleTree
from support.huggingface.families import FAMILIES, make
from support.huggingface.pairs import OPTIONS
from support.tiny_models import tiny_llama, tiny_qwen3

IDS = torch.tensor([[3, 4, 5]])


@pytest.mark.whole
@pytest.mark.parametrize("family", FAMILIES)
def test_a_class_does_without_its_layers_what_it_does_with_them(family: str) -> None:
    model = make(family, FAMILIES[family], 0).eval()
    argument, (name, layers) = cache_argument(type(model).forward), _list_of_layers(model)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        returned = model(IDS, use_cache=False, **{argument: cache}).get(argument) is cache
    count = len(layers)
    assert hands_cache_back(type(model).forward, model, argument, name.split(".")) == returned
    assert len(model.get_submodule(name)) == count


@pytest.mark.parametrize("make_model", [tiny_qwen3, tiny_llama])
@pytest.mark.parametrize("by_config", [False, True])
def test_a_wrapped_model_hands_back_what_its_class_does(
    make_model: Callable[[], PreTrainedModel], by_config: bool
) -> None:
    plain, wrapped = make_model(), compiled_llm.wrap(make_model(), **OPTIONS)
    asked = {} if by_config else {"use_cache": False}
    for model in (plain, wrapped):
        model.config.use_cache = not by_config

    def returned(model: PreTrainedModel, cache: Cache) -> bool:
        with torch.no_grad():
            output = model(IDS, past_key_values=cache, **asked)
        assert cache.get_seq_length() == IDS.shape[1]
        assert output.past_key_values is None or output.past_key_values is cache
        return output.past_key_values is cache

    expected = returned(plain, DynamicCache(config=plain.config))
    assert expected == (make_model is tiny_llama)
    assert returned(wrapped, DynamicCache(config=wrapped.config)) == expected
    assert returned(wrapped, wrapped.compiled.new_cache()) == expected
    assert wrapped.compiled.stats().forward_calls == {"compiled": 2}


def test_a_class_that_needs_its_layers_hands_a_cache_back() -> None:
    def forward(model: Any, **inputs: Any) -> None:
        raise IndexError(len(model.model.layers))

    model = tiny_qwen3()
    assert hands_cache_back(forward, model, "past_key_values", ["model", "layers"])


def _list_of_layers(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    found = ModuleTree(model, model.config.get_text_config(decoder=True).num_hidden_layers).list_of_layers
    assert found is not None
    return found
