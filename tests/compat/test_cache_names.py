"""The names of a cache are read from signatures and fields, and our functions take those of old as HuggingFace's do."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import LlamaForCausalLM as Llama, MambaForCausalLM as Mamba
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.mamba.modeling_mamba import MambaCausalLMOutput
from transformers.utils.deprecation import deprecate_kwarg

from compiled_llm.compat.cache_names import (
    NAMES,
    cache_argument,
    cache_in,
    generate_argument,
    gives_cache,
    output_field,
    taking_old_names,
)
from support.huggingface.cache_name import CACHE

pytestmark = pytest.mark.core

RENAMED = Version(transformers.__version__) >= Version("5.24")


def test_the_names_are_those_of_the_installed_version() -> None:
    of_mamba = "cache" if RENAMED else "cache_params"
    assert (cache_argument(Llama.forward), cache_argument(Mamba.forward)) == (CACHE, of_mamba)
    assert (generate_argument(Llama.forward), generate_argument(Mamba.forward)) == (CACHE, of_mamba)
    assert (output_field(GenerateDecoderOnlyOutput), output_field(MambaCausalLMOutput)) == (CACHE, of_mamba)
    assert ("cache" if RENAMED else "past_key_values") == CACHE


def test_a_forward_that_takes_anything_takes_what_generate_hands_it() -> None:
    def forward(self: Any, *args: Any, **kwargs: Any) -> None: ...

    def older(self: Any, input_ids: Any, past_key_values: Any = None) -> None: ...

    assert cache_argument(forward) == CACHE
    assert (cache_argument(older), generate_argument(older)) == ("past_key_values", CACHE)


@pytest.mark.parametrize("name", NAMES)
def test_a_call_gives_a_cache_under_any_of_its_names(name: str) -> None:
    assert gives_cache({name: object()})
    assert not gives_cache({name: None, "input_ids": object()})


def test_the_cache_in_an_output_is_found_under_its_name() -> None:
    cache: Any = object()
    assert cache_in(CausalLMOutputWithPast(**{CACHE: cache})) is cache
    assert cache_in(CausalLMOutputWithPast(logits=torch.zeros(1))) is None


def test_a_function_takes_names_of_old_as_another_one_does() -> None:
    def named() -> Callable[..., Any]:
        def forward(self: Any, new: Any = None, newer: Any = None, **rest: Any) -> Any:
            return new, newer, rest

        return forward

    decorated = deprecate_kwarg("old", "9.0.0", new_name="new")(
        deprecate_kwarg("older", "9.0.0", new_name="newer", raise_if_both_names=True)(named())
    )
    ours = taking_old_names(named(), decorated)
    assert inspect.signature(ours) == inspect.signature(decorated)
    assert taking_old_names(ours, named()) is ours

    def outcome(function: Callable[..., Any], **given: Any) -> tuple[Any, list[str]]:
        with warnings.catch_warnings(record=True) as noted:
            warnings.simplefilter("always")
            try:
                result = function("self", **given)
            except ValueError as error:
                result = str(error)
        return result, [str(notice.message) for notice in noted]

    for given in ({}, {"old": 1}, {"older": 2, "x": 3}, {"new": 1, "old": 2}, {"newer": 1, "older": 2}):
        assert outcome(ours, **given) == outcome(decorated, **given), given
    assert outcome(ours, old=1, older=2)[0] == (1, 2, {})


@pytest.mark.skipif(not RENAMED, reason="names of old are new before transformers 5.24")
def test_decorators_of_the_installed_version_are_found() -> None:
    def forward(self: Any, **kwargs: Any) -> Any:
        return kwargs

    taking = taking_old_names(forward, Llama.forward)
    with pytest.warns(FutureWarning, match="`past_key_values` is deprecated"):
        assert taking("self", past_key_values=1) == {"cache": 1}
    assert taking("self", cache_params=1) == {"cache_params": 1}
    assert taking_old_names(forward, Llama.generate) is not forward
