"""What encoders have made of images is kept by their pixels, within a bound, and forgotten with the texts."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from compiled_llm.engine.engine import Engine
from support.engine.tiny_engines import PATIENCE, greedy
from support.huggingface.vision import make
from support.images import Part, SampleImage, alone, answer, prompt_of, seeing
from support.parity import assert_account_is_empty

QWEN = "Qwen3VL"
CAT, DOG, WIDE = SampleImage(1), SampleImage(2), SampleImage(3, wide=True)
OF_CAT = 4 * 64 * 4 * 2
"""Bytes of four tokens in float32, of the last layer and of one before."""


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return seeing(QWEN)


@pytest.fixture
def engine(model: PreTrainedModel) -> Iterator[Engine]:
    with Engine(model) as running:
        yield running
    assert_account_is_empty(model)


@pytest.fixture
def encoded(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many images HuggingFace's encoder got, call by call."""
    return counted(monkeypatch, model)


def counted(monkeypatch: pytest.MonkeyPatch, model: Any) -> list[int]:
    compute, calls = model.model.get_image_features, list[int]()

    @functools.wraps(compute)
    def noted(pixel_values: Any, *others: Any, **options: Any) -> Any:
        calls.append(len(others[0]) if others else len(options.get("image_grid_thw", pixel_values)))
        return compute(pixel_values, *others, **options)

    monkeypatch.setattr(model.model, "get_image_features", noted)
    return calls


def asked(engine: Engine, *parts: Part, family: str = QWEN, **options: Any) -> list[int]:
    handle = engine.submit(prompt_of(family, *parts), greedy(9), **options)
    return list(handle.result(PATIENCE).outputs[0].token_ids)


def assert_answers(engine: Engine, *parts: Part, family: str = QWEN, **options: Any) -> None:
    assert asked(engine, *parts, family=family, **options) == answer(family, parts, 9)


def kept(model: PreTrainedModel) -> int:
    nbytes: int = model.compiled.stats().memory["encoder_cache"]
    return nbytes


def test_images_that_come_again_after_other_text_are_not_encoded_again(model, engine, encoded):
    assert_answers(engine, 5, CAT, 7, 8)
    assert_answers(engine, 9, 5, CAT, 7, 8)
    assert encoded == [1]
    assert_answers(engine, 6, DOG, 7, CAT, 8, WIDE, 9, DOG, 5)
    assert encoded == [1, 2], "the two that are new, and the one that is there twice once"
    assert_answers(engine, WIDE, 7)
    assert encoded == [1, 2]
    assert kept(model) == OF_CAT * 4


def test_prompts_that_go_on_inside_a_image_find_it(engine, encoded):
    """Pages have the text before, and the first tokens of the image."""
    assert_answers(engine, 5, WIDE, 7, 8)
    assert_answers(engine, 5, WIDE, 9, 8)
    assert_answers(engine, 5, WIDE, CAT, 9, 8)
    assert encoded == [1, 1]


@pytest.mark.drawn(most=2)
@pytest.mark.parametrize("family", ["Gemma3", "Llava", "Mistral3", "InternVL", "Glm4v", "Qwen3_5"])
def test_encoders_of_other_families_are_asked_once(family, monkeypatch):
    model = seeing(family)
    calls = counted(monkeypatch, model)
    with Engine(model) as engine:
        # The first run of some encoders hooks their layers, to take outputs out: that looks like another model.
        assert_answers(engine, 4, WIDE, 7, family=family)
        calls.clear()
        for first in (5, 6):
            assert_answers(engine, first, CAT, 7, DOG, 8, family=family)
    assert calls == [2]


def test_the_least_recently_used_make_room(model, encoded):
    with Engine(model, mm_encoder_cache_gb=2 * OF_CAT / 2**30) as engine:
        for first, image in enumerate((CAT, DOG, CAT, SampleImage(4), CAT, DOG)):
            assert_answers(engine, 20 + first, image, 7)
            assert kept(model) <= 2 * OF_CAT
    assert encoded == [1, 1, 1, 1]
    with Engine(model, mm_encoder_cache_gb=0) as engine:
        for first in (40, 41):
            assert_answers(engine, first, CAT, 7)
        assert kept(model) == 0
    assert encoded == [1] * 6
    with pytest.raises(ValueError, match="mm_encoder_cache_gb=-1: give GiB, 0 for none"):
        Engine(model, mm_encoder_cache_gb=-1)


def test_salts_share_nothing(engine, encoded):
    for first, salt in enumerate((None, "a", "b", "a")):
        assert_answers(engine, 20 + first, CAT, 7, cache_salt=salt)
    assert encoded == [1] * 3


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_sleep_gives_their_memory_back(model, encoded, prefix_cache):
    with Engine(model, prefix_cache=prefix_cache) as engine:
        assert_answers(engine, 5, CAT, 7)
        assert kept(model) == OF_CAT
        runner = model.compiled.model_runner()
        engine.sleep()
        assert runner.parts["encoder_cache"].nbytes == 0
        engine.wake()
        assert_answers(engine, 6, CAT, 7)
    assert encoded == [1, 1]


def test_other_weights_of_the_encoder_are_seen():
    model, changed = seeing(QWEN), make(QWEN)
    with Engine(model) as engine:
        assert_answers(engine, 5, CAT, 7, 8)
        for own in (model, changed):
            with torch.no_grad():
                own.model.visual.merger.linear_fc2.weight.mul_(-3)
        expected = alone(changed, prompt_of(QWEN, 9, CAT, 7, 8), 9)
        assert expected != answer(QWEN, (9, CAT, 7, 8), 9)
        assert asked(engine, 9, CAT, 7, 8) == expected


def test_features_of_another_image_would_be_found(engine, monkeypatch):
    assert_answers(engine, 5, CAT, 7, 8)
    monkeypatch.setattr("compiled_llm.engine.images.part.digests_of", lambda pixels, tokens: [b"x" * 64] * len(tokens))
    assert_answers(engine, 6, CAT, 7, 8)
    assert asked(engine, 9, DOG, 7, 8) != answer(QWEN, (9, DOG, 7, 8), 9)
