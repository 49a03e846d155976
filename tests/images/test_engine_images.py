"""Prompts with images in an engine, as a processor returns them: tokens of HuggingFace's `generate` alone."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import DynamicCache, Qwen3VLForConditionalGeneration

import compiled_llm
from compiled_llm.engine.engine import Engine
from compiled_llm.engine.images import part, request_images, resumed
from compiled_llm.engine.steps.request import Request
from compiled_llm.requests.sampling_params import SamplingParams
from support.engine.tiny_engines import PATIENCE, greedy
from support.execution.page_checks import check_pages, wrong_tags
from support.huggingface.vision import BOTH_WAYS, FAMILIES, make, one_image
from support.images import Part, SampleImage, alone, answer, prompt_of, seeing
from support.parity import assert_account_is_empty

QWEN = "Qwen3VL"
RESUMES = "mm_encoder_outputs" in inspect.signature(Qwen3VLForConditionalGeneration.forward).parameters
"""Whether HuggingFace's forward goes on inside an image: from transformers 5.24 on."""
CAT, DOG, WIDE = SampleImage(1), SampleImage(2), SampleImage(3, wide=True)


def asked(engine: Engine, *parts: Part, family: str = QWEN, tokens: int = 9, **options: Any) -> Any:
    return engine.submit(prompt_of(family, *parts), greedy(tokens), **options).result(PATIENCE)


@pytest.fixture
def engine() -> Iterator[Engine]:
    model = seeing(QWEN)
    with Engine(model) as running:
        yield running
    assert_account_is_empty(model)


@pytest.fixture
def original() -> Iterator[Engine]:
    """Prompts up to their last image are HuggingFace's to compute."""
    model = seeing(QWEN)
    with Engine(model, images_in_steps=False) as running:
        yield running
    assert_account_is_empty(model)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens HuggingFace's forward has computed, call by call."""
    calls: list[int] = []

    class Noted(DynamicCache):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            calls.append(0)

        def update(self, keys: Any, *others: Any, **options: Any) -> Any:
            calls[-1] = keys.shape[2]  # those before are what pages had
            return super().update(keys, *others, **options)

    for module in (request_images, resumed):
        monkeypatch.setattr(module, "DynamicCache", Noted)
    return calls


@pytest.mark.core
@pytest.mark.drawn(most=2)
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in BOTH_WAYS])
def test_a_image_has_huggingfaces_tokens(family, seed):
    model, plain = seeing(family, seed=seed), make(family, seed)
    with Engine(model) as engine:
        for other in (0, 0, 1):
            inputs = one_image(family, seed + other)
            expected = alone(plain, inputs, 8)
            output = engine.submit(inputs, greedy(8)).result(PATIENCE)
            assert output.outputs[0].token_ids == expected, (seed, other)
            assert output.prompt_token_ids == inputs["input_ids"][0].tolist()
            text = engine.submit([5, 6, 7, 8], greedy(8)).result(PATIENCE)
            assert text.outputs[0].token_ids == alone(plain, {"input_ids": torch.tensor([[5, 6, 7, 8]])}, 8)
    assert_account_is_empty(model)


def test_pixels_come_in_the_models_dtype(seed):
    """Processors return float32, which this encoder refuses if its weights are others."""
    model, plain = (make("Kimi_K25", seed).to(torch.bfloat16) for _ in range(2))
    inputs = one_image("Kimi_K25", seed)
    pixels = {"pixel_values": inputs["pixel_values"].to(torch.bfloat16)}
    compiled_llm.wrap(model, mode="eager", kv_memory="400 tokens", progress=False)
    with Engine(model) as engine:
        assert engine.submit(inputs, greedy(1)).result(PATIENCE).outputs[0].token_ids == alone(
            plain, inputs | pixels, 1
        )


@pytest.mark.parametrize("family", BOTH_WAYS)
def test_prompts_that_are_seen_both_ways_are_refused(family):
    with Engine(seeing(family)) as engine, pytest.raises(RuntimeError, match="sees their tokens both ways"):
        engine.submit(one_image(family))


def test_two_images_of_one_size_share_nothing_and_the_same_one_is_computed_once(original, computed):
    text = tuple(range(20, 30))
    assert asked(original, CAT, *text).cached_tokens == 0
    assert asked(original, DOG, *text).cached_tokens == 0
    assert asked(original, CAT, *text).cached_tokens == 12
    assert asked(original, CAT, *text[:8], 50, 51).cached_tokens == 12
    assert computed == [5, 5]


def test_text_before_a_image_is_shared_and_the_image_is_not(original, computed):
    text = tuple(range(20, 30))
    for parts, cached in (((*text, CAT, 7, 8), 0), ((*text, DOG, 7, 8), 8), ((*text, 7, 8), 8)):
        given = prompt_of(QWEN, *parts) if len(parts) == 13 else list(parts)
        output = original.submit(given, greedy(9)).result(PATIENCE)
        assert output.outputs[0].token_ids == answer(QWEN, parts, 9)
        assert output.cached_tokens == cached
    assert computed == ([15, 7] if RESUMES else [15, 15])


@pytest.mark.drawn(most=2)
@pytest.mark.parametrize("family", [QWEN, "Qwen2VL", "Qwen2_5_VL", "Qwen3VLMoe", "Glm4v"])
def test_a_text_that_parts_inside_a_image_begins_there(family, computed, seed):
    """Pages end within the images: the rest of them is computed, and the pages before stay shared."""
    with Engine(seeing(family, seed=seed), images_in_steps=False) as engine:
        for parts, cached in (((5, WIDE, 7, 8), 0), ((5, WIDE, 9, 8), 8), ((5, WIDE, CAT, 9, 8), 8)):
            output = asked(engine, *parts, family=family)
            assert output.outputs[0].token_ids == answer(family, parts, 9, seed)
            assert output.cached_tokens == cached
    assert computed == ([10, 2, 8] if RESUMES else [10, 10, 16])


@pytest.mark.parametrize("in_steps", [True, False])
def test_pages_of_images_are_checked_as_the_model_was_told_them(in_steps: bool) -> None:
    """The prefix cache knows images by keys, which no step is told; texts begin alike, and come while others run."""
    model = check_pages(seeing(QWEN, prefill_tokens=16))
    with Engine(model, images_in_steps=in_steps) as engine:
        several = SamplingParams(n=3, max_tokens=9, seed=1)
        for image in (WIDE, CAT, WIDE):
            prompts = [prompt_of(QWEN, *range(20, 30), image, *range(30, 30 + more)) for more in (10, 25)]
            handles = [engine.submit(prompt, several) for prompt in prompts]
            cached = [handle.result(PATIENCE).cached_tokens for handle in handles]
        assert min(cached) >= 16
    assert wrong_tags(model) == 0
    assert_account_is_empty(model)


def test_a_second_turn_goes_on_from_the_first(original, computed):
    first = asked(original, 5, WIDE, 7, 8)
    parts = (5, WIDE, 7, 8, *first.outputs[0].token_ids, 30, 31)
    second = asked(original, *parts)
    assert second.outputs[0].token_ids == answer(QWEN, parts, 9)
    assert second.cached_tokens == 20
    assert len(computed) == 1


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_several_answers_to_a_image(prefix_cache):
    with Engine(seeing(QWEN), prefix_cache=prefix_cache) as engine:
        params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, n=3)
        output = engine.submit(prompt_of(QWEN, 5, CAT, 7, 8), params).result(PATIENCE)
        assert [one.token_ids for one in output.outputs] == [answer(QWEN, (5, CAT, 7, 8), 9)] * 3


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("family", [QWEN, "Qwen3_5"])
def test_text_and_images_run_together(family, seed, whole):
    """Few pages: rows are preempted, and prompts with images are computed again from what was kept."""
    chance = random.Random(seed)
    model = seeing(family, tokens=120, seed=seed, prefill_tokens=16)
    with Engine(model, max_num_seqs=6, admission="greedy") as engine:
        handles = []
        for _ in range(200 if whole else 25):
            parts = drawn_prompt(chance)
            has_images = any(isinstance(part, SampleImage) for part in parts)
            given = prompt_of(family, *parts) if has_images else list(parts)
            tokens, priority = chance.choice([6, 12, 20]), chance.choice([0, 0, 1])
            handles.append((parts, tokens, engine.submit(given, greedy(tokens), priority=priority)))
            if chance.random() < 0.2:
                engine.submit(given, greedy(tokens)).cancel()
            if chance.random() < 0.1:
                next(iter(handles[-1][2]))
        for parts, tokens, handle in handles:
            assert handle.result(PATIENCE).outputs[0].token_ids == answer(family, parts, tokens, seed), (seed, parts)
        assert engine.stats().preemptions
    assert_account_is_empty(model)


def drawn_prompt(chance: random.Random) -> tuple[Part, ...]:
    """Text and up to two images, of two sizes; many prompts have the same ones."""
    first = tuple(range(10, 10 + chance.choice([0, 0, 3, 8])))
    images = [
        SampleImage(chance.choice([1, 1, 2, 3]), chance.random() < 0.4) for _ in range(chance.choice([0, 1, 1, 2]))
    ]
    parts: tuple[Part, ...] = first
    for image in images:
        parts = (*parts, image, *(chance.randrange(3, 100) for _ in range(chance.choice([1, 2]))))
    return (*parts, *range(30, 30 + chance.choice([2, 5])))


def test_drafts_read_ids_and_no_keys(monkeypatch):
    """What comes after an image's token in the text is guessed, and may be the image's next one."""
    read: list[Any] = []
    texts = Request.text_ids.fget
    monkeypatch.setattr(Request, "text_ids", property(lambda self: read.append(texts(self)) or read[-1]))
    parts = (5, CAT, 7, 8, CAT, 7, 8)
    with Engine(seeing(QWEN), speculative_config={"method": "ngram", "num_speculative_tokens": 3}) as engine:
        assert asked(engine, *parts, tokens=20).outputs[0].token_ids == answer(QWEN, parts, 20)
    assert read
    assert all((text >= 0).all() for text in read)


def test_a_prompt_that_huggingfaces_forward_refuses_ends_alone(engine):
    """It has tokens for another image than it gets."""
    bad = prompt_of("Llava", 5, CAT, 7)
    text = engine.submit([5, 6, 7], greedy(12))
    handle = engine.submit({**prompt_of(QWEN, 5, CAT, 7), "pixel_values": bad["pixel_values"]}, greedy(4))
    with pytest.raises(compiled_llm.RequestError, match="HuggingFace's forward of its images has failed: "):
        handle.result(PATIENCE)
    assert text.result(PATIENCE).outputs[0].token_ids == answer(QWEN, (5, 6, 7), 12)
    assert asked(engine, 5, CAT, 7).outputs[0].token_ids == answer(QWEN, (5, CAT, 7), 9)


# ---- what would be found


def differing(prompts: list[tuple[Part, ...]], in_steps: bool = True) -> list[tuple[Part, ...]]:
    with Engine(seeing(QWEN), images_in_steps=in_steps) as engine:
        return [parts for parts in prompts if asked(engine, *parts).outputs[0].token_ids != answer(QWEN, parts, 9)]


def test_ids_of_placeholders_as_keys_would_be_found(monkeypatch):
    prompts: list[tuple[Part, ...]] = [(CAT, *range(20, 30)), (DOG, *range(20, 30))]
    assert differing(prompts) == []
    monkeypatch.setattr("compiled_llm.engine.images.part.token_keys", lambda ids, *_: ids)
    assert differing(prompts) == [prompts[1]]


def _counted(positions: torch.Tensor) -> torch.Tensor:
    return torch.arange(positions.shape[-1]).expand(positions.shape)


def test_positions_without_a_images_offset_would_be_found(monkeypatch):
    prompts: list[tuple[Part, ...]] = [(5, WIDE, *range(20, 30))]
    positions = part.prompt_positions
    monkeypatch.setattr(part, "prompt_positions", lambda *given: _counted(positions(*given)))
    for in_steps in (False, True):
        assert differing(prompts, in_steps) == prompts


def test_a_state_taken_one_token_late_would_be_found(monkeypatch):
    family: str = "Qwen3_5"
    text = (20, 21, 22)

    def differs() -> bool:
        with Engine(seeing(family)) as engine:
            output = asked(engine, 5, CAT, *text, family=family)
            return bool(output.outputs[0].token_ids != answer(family, (5, CAT, *text), 9))

    assert not differs()
    taken, model = request_images.read_states, make(family)

    def late(cache, layers):
        with torch.no_grad():
            model(input_ids=torch.tensor([text[:1]]), past_key_values=cache, use_cache=True)
        return taken(cache, layers)

    monkeypatch.setattr(request_images, "read_states", late)
    assert differs()


@pytest.mark.skipif(not RESUMES, reason="prompts are computed from their beginning")
def test_features_of_other_tokens_would_be_found(monkeypatch):
    prompts: list[tuple[Part, ...]] = [(5, WIDE, *range(20, 30)), (5, WIDE, *range(40, 50))]
    assert differing(prompts, in_steps=False) == []
    flat = resumed.flat
    monkeypatch.setattr(resumed, "flat", lambda features: flat(features).roll(1, 0))
    assert differing(prompts, in_steps=False) == [prompts[1]]
