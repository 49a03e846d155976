"""A cache goes by its name of each version of transformers: users may take either, our own code causes no notice."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    CTRLConfig,
    CTRLLMHeadModel,
    DynamicCache,
    LlamaForCausalLM as Llama,
    PreTrainedModel,
    StaticCache,
)
from transformers.utils import generic

import compiled_llm
from compiled_llm.compat.cache_names import NAMES, cache_argument
from support.huggingface.cache_name import CACHE
from support.huggingface.recurrent_families import recurrent_model
from support.huggingface.vision import make as make_seeing, with_images
from support.parity import FEW_PAGES, assert_account_is_empty
from support.tiny_models import copy_of, tiny_llama

pytestmark = pytest.mark.core

IDS = torch.tensor([[5, 6, 7, 5, 6, 7, 8, 9], [9, 8, 7, 6, 5, 4, 3, 7]])
OPTIONS: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


class Older(Llama):
    """A model as it was written before the name changed."""

    def forward(self, input_ids: Any = None, past_key_values: Any = None, logits_to_keep: Any = 0, **rest: Any) -> Any:
        own = {} if past_key_values is None else {CACHE: past_key_values}
        return super().forward(input_ids=input_ids, logits_to_keep=logits_to_keep, **own, **rest)


def pair(make: Callable[[], PreTrainedModel] = tiny_llama) -> tuple[PreTrainedModel, PreTrainedModel]:
    return make(), compiled_llm.wrap(make(), mode="eager", **FEW_PAGES)


@pytest.fixture
def notices(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What HuggingFace says about names of old: it warns of arguments each time, and logs those of outputs once."""
    said: list[str] = []
    logger: Any = getattr(generic, "logger", None)
    if logger is not None:
        monkeypatch.setattr(logger, "warning_once", lambda text, *_: said.append(text), raising=False)
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        yield said
        said += [str(notice.message) for notice in noted]
    about_names = [text for text in said if any(f"`{name}`" in text for name in NAMES) and "deprecated" in text]
    assert not about_names


def of_llama(model: PreTrainedModel) -> Iterator[Tensor]:
    """All that hands a cache on: by our loops, by HuggingFace's, and by the user under its name."""

    def answer(**given: Any) -> Any:
        return model.generate(**{"input_ids": IDS, **OPTIONS, **given})

    first = answer(return_dict_in_generate=True)
    text = torch.cat([first.sequences, IDS[:, :2]], dim=1)
    yield answer(input_ids=text, **{CACHE: first[CACHE]})
    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=32)):
        yield answer(return_dict_in_generate=True, **{CACHE: cache}).sequences
        assert cache.get_seq_length() == 12
    yield answer(num_beams=2)
    yield answer(cache_implementation="static")
    yield answer(input_ids=None, inputs_embeds=model.get_input_embeddings()(IDS))
    for given in ({"prompt_lookup_num_tokens": 2}, {"assistant_model": tiny_llama(num_hidden_layers=1)}):
        yield answer(input_ids=IDS[:1], **given)
    output = model(IDS, use_cache=True)
    yield model(IDS[:, :1], **{CACHE: output[CACHE]}).logits


def of_mamba(model: PreTrainedModel) -> Iterator[Tensor]:
    argument = cache_argument(type(model).forward)
    first = model.generate(IDS, return_dict_in_generate=True, **OPTIONS)
    text = torch.cat([first.sequences, IDS[:, :2]], dim=1)
    yield model.generate(text, **{argument: first[CACHE]}, **OPTIONS)
    output = model(IDS, use_cache=True)
    yield model(IDS[:, :1], **{argument: output[argument]}).logits


def of_images(model: PreTrainedModel) -> Iterator[Tensor]:
    yield model.generate(**with_images("Qwen3VL"), **OPTIONS)


@torch.no_grad()
@pytest.mark.parametrize(
    ("make", "answers"),
    [
        (tiny_llama, of_llama),
        (lambda: recurrent_model("Mamba", 0), of_mamba),
        (lambda: make_seeing("Qwen3VL", 0), of_images),
    ],
    ids=["Llama", "Mamba", "Qwen3VL"],
)
def test_what_we_do_causes_no_notice(
    make: Callable[[], PreTrainedModel], answers: Callable[[PreTrainedModel], Iterator[Tensor]], notices: list[str]
) -> None:
    plain, wrapped = pair(make)
    for theirs, ours in zip(answers(plain), answers(wrapped), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def outcome(call: Callable[[], Any]) -> tuple[Any, list[tuple[type[Warning], str]]]:
    """The tokens of a call, or the class of its error; and its notices."""
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        try:
            result = call()
            if not isinstance(result, Tensor):
                result = result["logits"].argmax(-1) if "logits" in result else result["input_ids"]
            result = result.tolist()
        except (TypeError, ValueError) as error:
            result = type(error)
    said = [(notice.category, str(notice.message)) for notice in noted if notice.category is FutureWarning]
    return result, [(kind, text) for kind, text in said if "Both" not in text]  # those have the cache's repr


@torch.no_grad()
@pytest.mark.parametrize("names", [*((name,) for name in NAMES), ("cache", "past_key_values")], ids="+".join)
def test_a_cache_under_any_name_is_taken_or_refused_as_huggingface_does(names: tuple[str, ...]) -> None:
    models, results = pair(), []
    for model in models:
        given: dict[str, Any] = dict.fromkeys(names, DynamicCache(config=model.config))
        longer = torch.cat([IDS, IDS[:, :2]], dim=1)
        generating, preparing = partial(model.generate, IDS, **OPTIONS), model.prepare_inputs_for_generation
        calls = [generating, partial(model, IDS[:, :1]), partial(preparing, longer)]
        results.append([outcome(partial(call, **given)) for call in calls])
    assert results[1] == results[0]


@torch.no_grad()
@pytest.mark.parametrize("name", sorted({CACHE, "past_key_values"}))
def test_our_own_cache_goes_on_under_either_name(name: str) -> None:
    plain, wrapped = pair()
    results = []
    for model in (plain, wrapped):
        output = model(IDS, use_cache=True)
        logits = model(IDS[:, :1], **{name: output[name]}).logits
        first = model.generate(IDS, return_dict_in_generate=True, **OPTIONS)
        assert getattr(first, name) is first[CACHE] is first[name]
        text = torch.cat([first.sequences, IDS[:, :2]], dim=1)
        results.append((logits, model.generate(text, **{name: first[name]}, **OPTIONS)))
        del output, first
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)
    assert wrapped.compiled.stats().forward_calls == {"compiled": 2}
    assert wrapped.compiled.stats().generate_calls == {"fast loop": 2}
    assert_account_is_empty(wrapped)


@torch.no_grad()
def test_a_model_that_was_written_before_the_name_changed() -> None:
    plain, wrapped = pair(lambda: copy_of(Older, 0, {}))
    assert wrapped.compiled.facts.cache_argument == "past_key_values"
    for given in ({}, {"num_beams": 2}, {CACHE: DynamicCache}):
        made = [{name: kind() if callable(kind) else kind for name, kind in given.items()} for _ in range(2)]
        theirs, ours = (
            model.generate(IDS, **own, **OPTIONS) for model, own in zip((plain, wrapped), made, strict=True)
        )
        torch.testing.assert_close(ours, theirs)
    assert wrapped.compiled.stats().generate_calls == {"fast loop": 2, "compiled forward": 1}
    assert_account_is_empty(wrapped)


def small_ctrl() -> PreTrainedModel:
    torch.manual_seed(0)
    return CTRLLMHeadModel(CTRLConfig(vocab_size=128, n_positions=64, n_embd=32, dff=64, n_layer=2, n_head=2)).eval()


def test_a_model_that_prepares_its_inputs_itself_gives_huggingfaces_tokens() -> None:
    """CTRL's own ``prepare_inputs_for_generation`` is given the cache by name."""
    plain, wrapped = pair(small_ctrl)
    given = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    torch.testing.assert_close(wrapped.generate(**given, **OPTIONS), plain.generate(**given, **OPTIONS))
    assert_account_is_empty(wrapped)
