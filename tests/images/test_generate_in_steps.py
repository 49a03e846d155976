"""`generate` whose images steps read: HuggingFace's tokens, by our encoder and our prefill."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel

import compiled_llm
from compiled_llm.engine.images.encoder.encoder_step import PROGRAM as ENCODER
from compiled_llm.engine.images.shown_step import PROGRAM
from compiled_llm.huggingface import images
from support.huggingface.vision import IMAGE, make, one_image, with_images
from support.images import SampleImage, prompt_of
from support.parity import FEW_PAGES, assert_account_is_empty, greedy, next_turn

QWEN = "Qwen3VL"
FAMILIES = [QWEN, "Qwen2VL", "Qwen2_5_VL"]
KEPT = {"return_dict_in_generate": True}
WORDS = {"suppress_tokens": [*range(IMAGE, 128)]}
"""Of answers that another turn follows: in it, their tokens of images would ask for features."""


def pair(family: str, seed: int, **options: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    given = {"mode": "eager", "images_in_steps": True, **FEW_PAGES, **options}
    return make(family, seed), compiled_llm.wrap(make(family, seed), **given)


def launches(model: PreTrainedModel) -> int:
    """How many prefills had images."""
    return model.compiled.model_runner().events.used[PROGRAM.name]  # type: ignore[no-any-return]


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_huggingfaces(family, seed, monkeypatch):
    """Prompts of mixed lengths, padded on the left, with one image, none and two, cut by launches of 8 tokens."""
    encodings, features = list[Any](), images._features
    monkeypatch.setattr(images, "_features", lambda *given: encodings.append(given) or features(*given))
    plain, wrapped = pair(family, seed, prefill_tokens=8)
    inputs = with_images(family, seed)
    expected = greedy(plain, inputs, 10)
    assert not torch.equal(greedy(plain, with_images(family, seed + 1), 10), expected)
    for _ in range(2):
        torch.testing.assert_close(greedy(wrapped, inputs, 10), expected)
    stats = wrapped.compiled.stats()
    assert (stats.generate_calls, stats.slow_paths) == ({"fast loop": 2}, {})
    assert launches(wrapped) == len(encodings) == 2
    assert_account_is_empty(wrapped)


def test_beams_and_sequences_are_huggingfaces(seed):
    plain, wrapped = pair(QWEN, seed)
    inputs = with_images(QWEN, seed)
    for asked in ({"num_beams": 2}, {"num_beams": 2, "num_return_sequences": 2}):
        torch.testing.assert_close(greedy(wrapped, inputs, 8, **asked), greedy(plain, inputs, 8, **asked))
    several: Any = wrapped
    sampled = several.generate(**inputs, max_new_tokens=8, do_sample=True, top_k=1, num_return_sequences=2)
    torch.testing.assert_close(sampled, greedy(plain, inputs, 8).repeat_interleave(2, dim=0))
    assert wrapped.compiled.stats().slow_paths == {"beam_search": 2}
    assert_account_is_empty(wrapped)


def test_draws_do_not_depend_on_who_computes_the_prompt(seed):
    drawn = []
    for in_steps in (True, False):
        model: Any = pair(QWEN, seed, images_in_steps=in_steps)[1]
        torch.manual_seed(seed)
        drawn.append(model.generate(**with_images(QWEN, seed), max_new_tokens=12, do_sample=True, temperature=2.0))
    torch.testing.assert_close(*drawn)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_kept_cache_goes_on_with_another_image_and_then_with_text(family, seed):
    plain, wrapped = pair(family, seed)
    torch.testing.assert_close(three_turns(wrapped, family, seed), three_turns(plain, family, seed))
    stats = wrapped.compiled.stats()
    assert (stats.generate_calls, stats.slow_paths) == ({"fast loop": 3}, {})
    assert launches(wrapped) == 2


def three_turns(model: PreTrainedModel, family: str, seed: int) -> list[Tensor]:
    """Answers to an image, to a wider one and to text, over one cache."""
    first, second = (
        one_image(family, seed),
        prompt_of(family, 5, SampleImage(seed, wide=True), 7, SampleImage(seed + 1), 8),
    )
    turn = greedy(model, first, 6, **KEPT, **WORDS)
    given = {**second, **next_turn(first, turn, second["input_ids"])}
    types = second["mm_token_type_ids"]  # they mark what the cache does not hold yet
    given["mm_token_type_ids"] = pad(types, (given["input_ids"].shape[1] - types.shape[1], 0))
    later = greedy(model, given, 8, **KEPT, **WORDS)
    return [later.sequences, greedy(model, next_turn(given, later, torch.tensor([[7, 8]])), 5)]


def test_hidden_states_and_drafts_are_huggingfaces(seed):
    plain, wrapped = pair(QWEN, seed)
    inputs = with_images(QWEN, seed)
    asked = {**KEPT, "output_hidden_states": True, "output_logits": True}
    ours, theirs = (greedy(model, inputs, 4, **asked) for model in (wrapped, plain))
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(theirs.logits), rtol=1e-4, atol=1e-4)
    shown = inputs["attention_mask"].bool()
    for mine, other in zip(ours.hidden_states[0], theirs.hidden_states[0], strict=True):
        torch.testing.assert_close(mine[shown], other[shown], rtol=1e-4, atol=1e-4)
    alone = one_image(QWEN, seed)
    drafted = greedy(wrapped, alone, 8, prompt_lookup_num_tokens=2)
    torch.testing.assert_close(drafted, greedy(plain, alone, 8, prompt_lookup_num_tokens=2))


def test_inference_mode_and_an_engine_go_by_the_option(seed):
    plain, wrapped = pair(QWEN, seed)
    with torch.inference_mode():
        inputs = with_images(QWEN, seed)
        torch.testing.assert_close(greedy(wrapped, inputs, 6), greedy(plain, inputs, 6))
    with compiled_llm.Engine(wrapped) as engine:
        params = compiled_llm.SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
        answer = engine.submit(one_image(QWEN, seed), params).result(60).outputs[0].token_ids
    assert answer == greedy(plain, given := one_image(QWEN, seed), 6)[0, given["input_ids"].shape[1] :].tolist()
    assert launches(wrapped) == 2


def test_pixels_reach_the_forward_where_generate_encodes_nothing(seed, monkeypatch):
    """As before transformers 5.24."""
    plain, wrapped = pair(QWEN, seed)
    inputs = with_images(QWEN, seed)
    expected = greedy(plain, inputs, 8)
    for model in (plain, wrapped):
        monkeypatch.setattr(model, "_supports_mm_encoder_outputs", lambda: False)
    monkeypatch.setattr(images, "encoded", lambda model, runtime, given: given)
    torch.testing.assert_close(greedy(wrapped, inputs, 8), expected)
    assert (wrapped.compiled.stats().slow_paths, launches(wrapped)) == ({}, 1)


# ---- what HuggingFace's forward computes


def test_others_are_computed_by_huggingfaces_forward(seed):
    plain, wrapped = pair(QWEN, seed)
    for given, asked in (
        (with_images(QWEN, seed, right=True), {}),
        (with_images(QWEN, seed), {"past_key_values": DynamicCache}),
        (with_images(QWEN, seed), {"cache_implementation": "static", **KEPT}),
    ):
        ours, theirs = (
            greedy(model, given, 6, **{name: own() if callable(own) else own for name, own in asked.items()})
            for model in (wrapped, plain)
        )
        torch.testing.assert_close(*(getattr(own, "sequences", own) for own in (ours, theirs)))
    assert launches(wrapped) == 0
    assert wrapped.compiled.stats().slow_paths["prefill"] >= 2


def test_other_models_are_as_without_the_option(seed):
    plain, wrapped = pair("Gemma3", seed)
    inputs = with_images("Gemma3", seed)
    torch.testing.assert_close(greedy(wrapped, inputs, 6), greedy(plain, inputs, 6))
    assert wrapped.compiled.stats().slow_paths == {"prefill": 1}


def test_images_of_other_sizes_than_their_tokens_leave_the_cache_as_it_was(seed):
    plain, wrapped = pair(QWEN, seed)
    first = one_image(QWEN, seed)
    kept = greedy(wrapped, first, 6, **KEPT, **WORDS)
    second = prompt_of(QWEN, 7, SampleImage(3), 8)
    wrong = {**second, **next_turn(first, kept, second["input_ids"].clamp(max=IMAGE - 1))}
    types = second["mm_token_type_ids"]
    wrong["mm_token_type_ids"] = pad(types, (wrong["input_ids"].shape[1] - types.shape[1], 0))
    with pytest.raises(ValueError, match="0 tokens of images and features of 4 do not match"):
        greedy(wrapped, wrong, 6)
    before = greedy(plain, first, 6, **KEPT, **WORDS)
    answers = [
        greedy(model, next_turn(first, turn, torch.tensor([[7, 7]])), 6)
        for model, turn in ((wrapped, kept), (plain, before))
    ]
    torch.testing.assert_close(*answers)


# ---- what would be found

Fault = Callable[[Any, Any, Any], Any]


@pytest.mark.parametrize(
    "fault",
    [
        lambda columns, row, own: own._replace(numbers=np.arange(len(own.numbers))),
        lambda columns, row, own: own._replace(positions=own.positions[-1:].repeat(3, axis=0)),
        lambda columns, row, own: own._replace(features=own.features * torch.tensor([1.0, 0.0])[:, None, None]),
    ],
    ids=["features of another row", "one axis of positions", "no features of further layers"],
)
def test_faults_would_be_found(fault: Fault, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    models, inputs = pair(QWEN, seed), with_images(QWEN, seed)
    torch.testing.assert_close(*(logits(model, inputs) for model in models), rtol=1e-4, atol=1e-4)
    of = images.ShownColumns.select

    def wrong(columns: Any, row: int, places: Any) -> Any:
        own = of(columns, row, places)
        return None if own is None else fault(columns, row, own)

    monkeypatch.setattr(images.ShownColumns, "select", wrong)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(*(logits(model, inputs) for model in models), rtol=1e-3, atol=1e-3)


def logits(model: PreTrainedModel, inputs: dict[str, Tensor]) -> Tensor:
    """`[1, B, V]`, of the first tokens."""
    return torch.stack(greedy(model, inputs, 1, **KEPT, output_logits=True).logits)


# ---- compiled


@pytest.mark.whole
@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_of_images_compile_nothing_after_warmup(family, seed):
    plain, wrapped = pair(family, seed, mode="cuda-graphs")
    wrapped.compiled.warmup([1, 3])
    assert {PROGRAM.name, ENCODER.name} <= wrapped.compiled.model_runner().graph_manager.prefills
    before = wrapped.compiled.stats()
    prompts = [
        (5, SampleImage(1), 7),
        (5, SampleImage(2, wide=True), 7, 8, 9),
        (6, SampleImage(1), 3, SampleImage(2, wide=True), 4),
    ]
    for given in (*(prompt_of(family, *parts) for parts in prompts), with_images(family, seed)):
        torch.testing.assert_close(greedy(wrapped, given, 8), greedy(plain, given, 8))
    after = wrapped.compiled.stats()
    assert (after.graphs, after.recompiles, after.graph_breaks) == (before.graphs, 0, 0)
