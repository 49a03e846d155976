"""Pages stand in for caches of HuggingFace's: prompts padded on the right, static caches, and caches of the user's."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache

import compiled_llm
from support.huggingface import vision
from support.huggingface.callbacks import Raising
from support.huggingface.families import FAMILIES, make
from support.huggingface.overriding import embed_prompt, shift_ids, skip_positions
from support.huggingface.pairs import OPTIONS, pair
from support.parity import assert_account_is_empty, greedy, next_turn

pytestmark = pytest.mark.core

EARLY = list(range(64))
CLOSE: dict[str, float] = {"rtol": 1e-4, "atol": 1e-4}
KINDS: dict[str, Callable[[Any], Cache]] = {
    "dynamic": lambda config: DynamicCache(config=config),
    "lazy": lambda config: DynamicCache(),
    "static": lambda config: StaticCache(config=config, max_cache_len=64),
}
LOOPS: dict[str, dict[str, Any]] = {
    "fast loop": {},
    "processed loop": {"no_repeat_ngram_size": 2},
    "compiled forward": {"num_beams": 3},
    "original": {"use_cache": False},  # each step computes the prompt again; its logits may be a masked token's
}


def models_of(family: str, seed: int, **overrides: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    if family == "Qwen3":
        return pair(**overrides)
    twins = [make(family, {**FAMILIES[family], **overrides}, seed) for _ in range(2)]
    return twins[0], compiled_llm.wrap(twins[1], **OPTIONS)


@pytest.fixture
def right(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.flip(1) for name, value in inputs.items()}


def whole(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clamp(min=1) for name, value in inputs.items()}


def assert_same_contents(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    for layer, expected in zip(ours.layers, theirs.layers, strict=True):
        assert int(layer.get_seq_length()) == int(expected.get_seq_length())
        torch.testing.assert_close((layer.keys, layer.values), (expected.keys, expected.values), **CLOSE)


# ---- prompts padded on the right


@pytest.mark.drawn(most=4)
@pytest.mark.parametrize("eos", [None, EARLY], ids=["on", "early"])
@pytest.mark.parametrize("loop", LOOPS)
def test_prompts_padded_on_the_right(loop, eos, right):
    plain, wrapped = pair(eos_token_id=eos)
    for _ in range(2):
        torch.testing.assert_close(greedy(wrapped, right, 14, **LOOPS[loop]), greedy(plain, right, 14, **LOOPS[loop]))
    assert wrapped.compiled.stats().generate_calls == {loop: 2}
    assert wrapped.compiled.stats().slow_paths == {"right_padding" if loop == "original" else "prefill": 2}
    if loop != "original":
        assert_account_is_empty(wrapped)


def test_draws_after_a_prefill_of_huggingfaces_follow_the_seed_and_the_settings(right):
    plain, wrapped = pair(eos_token_id=None)

    def drawn(**options: Any) -> Tensor:
        torch.manual_seed(3)
        return wrapped.generate(**right, max_new_tokens=12, do_sample=True, **options)

    torch.testing.assert_close(drawn(top_k=1), greedy(plain, right, 12))
    torch.testing.assert_close(drawn(temperature=0.9), drawn(temperature=0.9))
    assert not torch.equal(drawn(temperature=2.0), drawn(top_k=1))
    penalty = {"repetition_penalty": 1.5}
    torch.testing.assert_close(drawn(top_k=1, **penalty), greedy(plain, right, 12, **penalty))
    assert set(wrapped.compiled.stats().generate_calls) == {"fast loop"}
    assert_account_is_empty(wrapped)


# ---- caches of the user's


@pytest.mark.parametrize("family", ["Qwen3", "Gemma3"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_conversation_over_a_cache_of_huggingfaces(kind, family, inputs, seed):
    """After the first turn a row's first new token is hidden, which Gemma's windows count."""
    models = models_of(family, seed)
    caches = [KINDS[kind](models[0].config) for _ in models]
    answers: list[list[Tensor]] = [[], []]
    for model, cache, answer in zip(models, caches, answers, strict=True):
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        for turn in range(3):
            out = greedy(model, {"input_ids": ids, "attention_mask": mask}, 6, past_key_values=cache)
            answer.append(out)
            hidden = torch.ones(3, 9, dtype=torch.long)
            hidden[1, 6] = turn != 0
            ids, mask = torch.cat([out, torch.full((3, 3), 5 + turn)], dim=1), torch.cat([mask, hidden], dim=1)
    torch.testing.assert_close(answers[1], answers[0])
    first = {"fast loop": 1, "original": 2} if family == "Gemma3" else {"fast loop": 3}
    assert models[1].compiled.stats().generate_calls == first
    assert_same_contents(caches[1], caches[0])
    assert_account_is_empty(models[1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loop", ["fast loop", "processed loop"])
def test_a_cache_that_rows_end_early_in(loop, kind, inputs):
    models = pair(eos_token_id=EARLY)
    caches = [KINDS[kind](models[0].config) for _ in models]
    results = [
        greedy(model, whole(inputs), 20, past_key_values=cache, return_dict_in_generate=True, **LOOPS[loop])
        for model, cache in zip(models, caches, strict=True)
    ]
    torch.testing.assert_close(results[1].sequences, results[0].sequences)
    assert results[1].past_key_values is caches[1]
    assert_same_contents(caches[1], caches[0])
    assert models[1].compiled.stats().generate_calls == {loop: 1}
    assert_account_is_empty(models[1])


def test_a_cache_goes_on_where_huggingfaces_prefill_has_left_windows(seed):
    """Pages have all tokens, so the rows can be cropped."""
    plain, wrapped = (vision.make("Gemma3", seed), compiled_llm.wrap(vision.make("Gemma3", seed), **OPTIONS))
    inputs = vision.with_images("Gemma3", seed)
    width = inputs["input_ids"].shape[1]
    first = greedy(wrapped, inputs, 6, return_dict_in_generate=True)
    first.past_key_values.crop(-5)
    assert first.past_key_values.get_seq_length() == width
    first.sequences = inputs["input_ids"]
    given = next_turn(inputs, first, torch.full((3, 2), 7))
    types = torch.nn.functional.pad(inputs["token_type_ids"], (0, 2))
    expected = greedy(plain, {**inputs, **given, "token_type_ids": types, "past_key_values": None}, 8)
    torch.testing.assert_close(greedy(wrapped, given, 8), expected)


def test_drafts_after_a_prompt_padded_on_the_right(right):
    plain, wrapped = pair(eos_token_id=None)
    one = {
        "input_ids": right["input_ids"][1:2].repeat(1, 3),
        "attention_mask": right["attention_mask"][1:2].repeat(1, 3),
    }
    one["attention_mask"][:, -2:] = 0
    options = {"prompt_lookup_num_tokens": 3}
    torch.testing.assert_close(greedy(wrapped, one, 16, **options), greedy(plain, one, 16, **options))
    assert wrapped.compiled.stats().generate_calls == {"fast loop": 1}
    assert_account_is_empty(wrapped)


def test_a_static_cache_by_name_is_ours_and_is_huggingfaces_where_it_is_returned(inputs):
    models = pair(eos_token_id=None)
    for options in ({}, {"num_beams": 2}):
        theirs, ours = (greedy(model, inputs, 12, cache_implementation="static", **options) for model in models)
        torch.testing.assert_close(ours, theirs)
    options = {"cache_implementation": "static", "return_dict_in_generate": True}
    theirs, ours = (greedy(model, inputs, 12, **options) for model in models)
    torch.testing.assert_close(ours.sequences, theirs.sequences)
    assert_same_contents(ours.past_key_values, theirs.past_key_values)
    assert models[1].compiled.stats().generate_calls == {"fast loop": 2, "compiled forward": 1}
    assert_account_is_empty(models[1])


@pytest.mark.parametrize("override", [shift_ids, skip_positions, embed_prompt], ids=lambda change: change.__name__)
@pytest.mark.parametrize("given", ["right", "dynamic"])
def test_what_users_override_holds_over_stand_ins(given, override, inputs, right):
    models = pair(eos_token_id=None)
    caches = [KINDS["dynamic"](model.config) for model in models]
    results = []
    for model, cache in zip(models, caches, strict=True):
        override(model)
        options = {"past_key_values": cache} if given == "dynamic" else {}
        results.append(greedy(model, whole(inputs) if options else right, 9, **options))
    torch.testing.assert_close(results[1], results[0])
    assert_same_contents(caches[1], caches[0])
    gc.collect()
    assert_account_is_empty(models[1])


# ---- what stays HuggingFace's


class Quantizing(DynamicCache):
    """A cache whose layers might do anything."""


@pytest.mark.parametrize(
    ("name", "make_cache", "options"),
    [
        ("past_key_values", lambda config: Quantizing(config=config), {}),
        ("past_key_values", lambda config: DynamicCache(config=config), {"num_beams": 2}),
        ("past_key_values", lambda config: StaticCache(config=config, max_cache_len=20), {"max_new_tokens": 2}),
        ("max_batch_size", lambda config: DynamicCache(config=config), {"num_return_sequences": 6, "do_sample": True}),
    ],
    ids=["subclass", "beams", "room", "rows"],
)
def test_what_pages_cannot_stand_in_for_takes_the_original_path(name, make_cache, options, inputs, seed):
    models = pair(eos_token_id=None)
    results = []
    for model in models:
        torch.manual_seed(seed)
        given = {"max_new_tokens": 4, "do_sample": False, **options}
        if name == "past_key_values" and "max_new_tokens" in options:
            given["max_length"], given["max_new_tokens"] = 22, None  # more than it has room for, unless rows end
            given["eos_token_id"] = list(range(128))
        results.append(model.generate(**inputs, past_key_values=make_cache(model.config), **given))
    torch.testing.assert_close(results[1], results[0])
    assert models[1].compiled.stats().generate_calls == {"original": 1}
    assert models[1].compiled.stats().slow_paths == {name: 1}


def test_caches_on_other_devices_and_in_fewer_bits_stay_huggingfaces(inputs):
    """They need CUDA, or a package that is not here, so the call itself fails."""
    _, wrapped = pair(eos_token_id=None)
    for name in ("offloaded", "quantized"):
        with pytest.raises((ImportError, RuntimeError, ValueError, AssertionError)):
            greedy(wrapped, inputs, 3, cache_implementation=name)
    assert wrapped.compiled.stats().generate_calls == {"original": 2}
    assert wrapped.compiled.stats().slow_paths == {"cache_implementation": 2}


def test_a_call_that_fails_leaves_no_page_in_use_and_the_next_one_works(inputs):
    plain, wrapped = pair(eos_token_id=None)
    one = {name: value[1:2].flip(1) for name, value in inputs.items()}
    one["attention_mask"][0, -2:] = 0
    cache = DynamicCache(config=wrapped.config)
    for given in ({}, {"past_key_values": cache}):
        with pytest.raises(ArithmeticError):
            greedy(wrapped, one, 9, streamer=Raising(3, ArithmeticError), **given)
        gc.collect()
        assert_account_is_empty(wrapped)
    assert cache.get_seq_length() == 9, "as far as HuggingFace's own forward had come"
    torch.testing.assert_close(greedy(wrapped, one, 9), greedy(plain, one, 9))
    assert_account_is_empty(wrapped)
