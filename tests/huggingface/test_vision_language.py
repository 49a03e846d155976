"""Vision-language models: text alone is the fast loop's, and after HuggingFace's prefill of images, so is decode."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

import compiled_llm
from support.huggingface.vision import (
    BOTH_WAYS,
    FAMILIES,
    IMAGE,
    START,
    make,
    one_image,
    types_of_text,
    with_images,
)
from support.parity import FEW_PAGES, assert_account_is_empty, greedy, mixed_prompts, next_turn

pytestmark = pytest.mark.core


def pair(family: str, seed: int, mode: str = "eager") -> tuple[PreTrainedModel, PreTrainedModel]:
    return make(family, seed), compiled_llm.wrap(make(family, seed), mode=mode, **FEW_PAGES)  # type: ignore[arg-type]


def two_turns(model: PreTrainedModel, inputs: dict[str, Tensor]) -> Tensor:
    """An answer, two more tokens, and the answer to those over the same cache."""
    first = greedy(model, inputs, 6, return_dict_in_generate=True)
    answer: Tensor = greedy(model, next_turn(inputs, first, torch.full((3, 2), 7)), 9)
    return answer


@pytest.fixture
def inputs(seed: int) -> dict[str, Tensor]:
    return mixed_prompts([4, 9, 6], 100, seed)


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("family", FAMILIES)
def test_text_alone_is_the_fast_loops(family, inputs, seed):
    plain, wrapped = pair(family, seed)
    typed = {**inputs, **types_of_text(family, inputs["input_ids"])}
    for given in (inputs, typed):
        expected = greedy(plain, given, 12)
        torch.testing.assert_close(greedy(wrapped, given, 12), expected)
    assert wrapped.compiled.stats().generate_calls == {"fast loop": 2}
    torch.testing.assert_close(greedy(wrapped, typed, 9, num_beams=2), greedy(plain, typed, 9, num_beams=2))
    assert wrapped.compiled.stats().generate_calls == {"fast loop": 2, "compiled forward": 1}
    assert_account_is_empty(wrapped)


@pytest.mark.parametrize("family", ["Gemma3", "Qwen3VL"])
def test_a_forward_over_text_is_compiled(family, inputs, seed):
    plain, wrapped = pair(family, seed)
    typed = {**inputs, **types_of_text(family, inputs["input_ids"])}
    shown = inputs["attention_mask"].bool()
    with torch.no_grad():
        expected, logits = plain(**typed).logits, wrapped(**typed, use_cache=False).logits
    torch.testing.assert_close(logits[shown], expected[shown], rtol=1e-4, atol=1e-4)
    assert wrapped.compiled.stats().forward_calls == {"compiled": 1}


@pytest.mark.drawn(most=2)
@pytest.mark.parametrize("family", FAMILIES)
def test_images_are_computed_by_huggingfaces_forward_and_tokens_by_ours(family, seed):
    plain, wrapped = pair(family, seed)
    inputs = with_images(family, seed)
    expected = greedy(plain, inputs, 10)
    assert not torch.equal(greedy(plain, with_images(family, seed + 1), 10), expected)
    for _ in range(2):
        torch.testing.assert_close(greedy(wrapped, inputs, 10), expected)
    sampled = wrapped.generate(**inputs, max_new_tokens=10, do_sample=True, top_k=1)
    torch.testing.assert_close(sampled, expected)
    torch.testing.assert_close(greedy(wrapped, inputs, 8, num_beams=2), greedy(plain, inputs, 8, num_beams=2))
    stats = wrapped.compiled.stats()
    assert stats.generate_calls == {"fast loop": 3, "compiled forward": 1}
    assert stats.slow_paths == {"prefill": 4}
    assert_account_is_empty(wrapped)


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_kept_cache_goes_on_with_another_image_and_then_with_text(family, seed):
    """HuggingFace's forward computes the new image over copies of what the pages hold."""
    plain, wrapped = pair(family, seed)
    torch.testing.assert_close(three_turns(wrapped, family, seed), three_turns(plain, family, seed))
    stats = wrapped.compiled.stats()
    assert stats.generate_calls == {"fast loop": 3}
    assert stats.slow_paths == {"prefill": 3 if family in BOTH_WAYS else 2}


@pytest.mark.parametrize("family", BOTH_WAYS)
def test_prompts_that_are_seen_both_ways_are_huggingfaces(family, inputs, seed):
    """Of text, too; a forward of several tokens and drafts are all its own, and an engine refuses the model."""
    plain, wrapped = pair(family, seed)
    typed = {**inputs, **types_of_text(family, inputs["input_ids"])}
    for given in (typed, {**typed, "token_type_ids": typed["token_type_ids"] + 1}):
        torch.testing.assert_close(greedy(wrapped, given, 8), greedy(plain, given, 8))
    assert wrapped.compiled.stats().slow_paths == {"prefill": 2}
    with torch.no_grad():
        torch.testing.assert_close(wrapped(**typed).logits, plain(**typed).logits)
    assert wrapped.compiled.stats().forward_calls == {"original": 1}
    alone = {name: value[1:2] for name, value in typed.items()}
    drafted = greedy(wrapped, alone, 8, prompt_lookup_num_tokens=2)
    torch.testing.assert_close(drafted, greedy(plain, alone, 8, prompt_lookup_num_tokens=2))
    assert wrapped.compiled.stats().generate_calls == {"fast loop": 2, "original": 1}
    with (
        compiled_llm.Engine(wrapped) as engine,
        pytest.raises(RuntimeError, match="the model sees their tokens both ways"),
    ):
        engine.generate([[5, 6, 7]])
    with pytest.raises(ValueError, match=r"prompt: PaliGemma.* both ways, .*; call model.generate"):
        wrapped.compiled.generate_loop().admit(np.array([5, 6, 7]), 4)
    assert_account_is_empty(wrapped)


def test_an_image_that_huggingfaces_forward_refuses_leaves_the_cache_as_it_was(seed):
    plain, wrapped = pair("Llava", seed)
    first = one_image("Llava", seed)
    kept = greedy(wrapped, first, 6, return_dict_in_generate=True)
    with pytest.raises(ValueError, match="do not match"):
        greedy(wrapped, {**next_turn(first, kept, torch.tensor([[7, 7]])), "pixel_values": first["pixel_values"]}, 6)
    before = greedy(plain, first, 6, return_dict_in_generate=True)
    answers = [
        greedy(model, next_turn(first, turn, torch.tensor([[7, 7]])), 6)
        for model, turn in ((wrapped, kept), (plain, before))
    ]
    torch.testing.assert_close(*answers)


def three_turns(model: PreTrainedModel, family: str, seed: int) -> list[Tensor]:
    """Answers to an image, to another one and to text, over one cache."""
    first, second = one_image(family, seed), one_image(family, seed + 1)
    words: dict[str, Any] = {"suppress_tokens": [*range(IMAGE, 128)], "return_dict_in_generate": True}
    turn = greedy(model, first, 6, **words)
    given = {**second, **next_turn(first, turn, second["input_ids"])}
    for name in [name for name in second if name.endswith("type_ids")]:  # they mark what the cache does not hold yet
        given[name] = pad(second[name], (given["input_ids"].shape[1] - second[name].shape[1], 0))
    later = greedy(model, given, 8, **words)
    return [later.sequences, greedy(model, next_turn(given, later, torch.tensor([[7, 8]])), 5)]


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("family", ["Gemma3", "Qwen2VL"])
def test_images_in_prompts_padded_on_the_right(family, seed):
    """Over the columns of a padded row, Gemma's windows would not be those over what pages hold."""
    plain, wrapped = pair(family, seed)
    inputs = with_images(family, seed, right=True)
    torch.testing.assert_close(greedy(wrapped, inputs, 10), greedy(plain, inputs, 10))
    assert wrapped.compiled.stats().generate_calls == {"original" if family == "Gemma3" else "fast loop": 1}


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize(
    ("family", "images"), [("Gemma3", False), ("Qwen2VL", False), ("Qwen2VL", True), ("Llava", True)]
)
def test_text_goes_on_over_a_cache(family, images, inputs, seed):
    models, given = pair(family, seed), with_images(family, seed) if images else inputs
    torch.testing.assert_close(*(two_turns(model, given) for model in models))
    assert models[1].compiled.stats().generate_calls["fast loop"] >= (1 if images else 2)


def test_a_prompt_that_ends_inside_an_image_takes_the_original_path(seed):
    """The position of the next token differs from axis to axis."""
    plain, wrapped = pair("Qwen2VL", seed)
    ids = torch.tensor([[5, 6, 7, START, *[IMAGE] * 4]])
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": (ids == IMAGE).long()}
    pixels = {"pixel_values": torch.randn(16, 96), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    torch.testing.assert_close(greedy(wrapped, {**given, **pixels}, 6), greedy(plain, {**given, **pixels}, 6))
    assert wrapped.compiled.stats().generate_calls == {"original": 1}


@pytest.mark.whole
@pytest.mark.usefixtures("without_inductor")
def test_text_alone_compiles_whole(inputs, seed):
    plain, wrapped = pair("Qwen2VL", seed, mode="compile")
    for _ in range(2):
        torch.testing.assert_close(greedy(wrapped, inputs, 9), greedy(plain, inputs, 9))
    stats = wrapped.compiled.stats()
    assert stats.generate_calls == {"fast loop": 2}
    assert stats.recompiles == 0


def test_a_cache_of_a_call_before_another_with_images_is_refused_in_one_sentence(seed):
    """HuggingFace's positions of the second turn are by the offsets of the last call, whose rows are others."""
    plain, wrapped = pair("Qwen3VL", seed)
    text = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "attention_mask": torch.ones(1, 4, dtype=torch.long)}
    first = greedy(wrapped, text, 5, return_dict_in_generate=True)
    greedy(wrapped, with_images("Qwen3VL", seed), 4)
    with pytest.raises(ValueError, match=r"position_ids: 3 rows for input_ids of 1; .* rope_deltas"):
        greedy(wrapped, next_turn(text, first, torch.tensor([[7, 7]])), 5)
    torch.testing.assert_close(greedy(wrapped, text, 5), greedy(plain, text, 5))
    first.past_key_values.close()
    assert_account_is_empty(wrapped)


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("family", ["Qwen2VL", "Qwen3VL"])
def test_a_model_that_ran_under_inference_mode_before_is_wrapped_and_left_as_it_was(family, seed):
    """Its forward keeps a tensor of its images, which is then one of inference mode."""
    plain, model = make(family, seed), make(family, seed)
    images, text = with_images(family, seed), mixed_prompts([5, 8], 100, seed)
    with torch.inference_mode():
        greedy(model, images, 4)
    kept = model.model.rope_deltas
    values = kept.clone()
    wrapped = compiled_llm.wrap(model, mode="eager", **FEW_PAGES)
    assert kept.is_inference()
    assert model.model.rope_deltas is kept
    assert torch.equal(kept, values)
    for given in (images, text):
        torch.testing.assert_close(greedy(wrapped, given, 8), greedy(plain, given, 8))
    assert_account_is_empty(wrapped)
