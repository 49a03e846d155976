"""Guidance by twin rows: HuggingFace's tokens, scores and caches, with one forward a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import compiled_llm
from compiled_llm.execution.generate_loop import GenerateLoop
from support.huggingface.families import make
from support.huggingface.pairs import OPTIONS
from support.noting import note_calls
from support.parity import assert_account_is_empty, greedy, mixed_prompts
from support.tiny_models import WINDOWS, tiny_qwen3

pytestmark = pytest.mark.core

NEW = 14


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each decode step had."""
    return note_calls(monkeypatch, GenerateLoop, "decode", lambda self, *_, **__: len(self.rows))


def negative(lengths: list[int], seed: int) -> dict[str, Tensor]:
    return {f"negative_prompt_{name.removeprefix('input_')}": value for name, value in _prompts(lengths, seed).items()}


def _prompts(lengths: list[int], seed: int) -> dict[str, Tensor]:
    return mixed_prompts(lengths, 128, seed + 1)


SETTINGS: dict[str, dict[str, Any]] = {
    "alone": {},
    "a small scale": {"guidance_scale": 0.4},
    "other processors": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "sequence_bias": {(9,): 2.0}},
    "rows that end early": {"eos_token_id": list(range(3, 90, 3)), "pad_token_id": 1},
    "several results": {"return_dict_in_generate": True, "output_scores": True, "output_logits": True},
}


@pytest.mark.parametrize("negatives", [None, [3, 7, 5]], ids=["no negative prompts", "negative prompts"])
@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS)
def test_guided_answers_are_huggingfaces(options, negatives, plain, model, decoded, reading, seed):
    inputs = mixed_prompts([4, 9, 6], 128, seed)
    given = {} if negatives is None else negative(negatives, seed)
    options = {"guidance_scale": 1.7, **given, **options}
    expected, actual = (greedy(own, inputs, NEW, **options) for own in (plain, model))
    assert set(decoded) == {6}
    if isinstance(expected, Tensor):
        assert torch.equal(actual, expected)
    else:
        assert torch.equal(actual.sequences, expected.sequences)
        for name in ("scores", "logits"):
            torch.testing.assert_close(torch.stack(actual[name]), torch.stack(expected[name]), atol=1e-4, rtol=0)
        del actual
    assert_account_is_empty(model)


def test_drawn_tokens_are_those_that_huggingfaces_processor_gives(model, decoded, reading, seed):
    """The same draws, whoever computes the negative prompts."""
    small = compiled_llm.wrap(tiny_qwen3(eos_token_id=None), **{**OPTIONS, "max_batch_size": 3})
    inputs, answers = mixed_prompts([4, 9, 6], 128, seed), []
    for own in (model, small):
        torch.manual_seed(seed)
        options = {"guidance_scale": 1.4, "temperature": 1.3, "top_p": 0.95, "num_return_sequences": 1}
        answers.append(own.generate(**inputs, do_sample=True, max_new_tokens=NEW, **options))
    assert torch.equal(*answers)
    assert decoded[:13] == [6] * 13
    assert set(decoded[13:]) == {3}
    assert_account_is_empty(small)


def test_copies_of_a_prompt_have_twins_of_their_own(model, decoded, seed):
    torch.manual_seed(seed)
    options = {"guidance_scale": 1.4, "num_return_sequences": 4, "temperature": 2.0}
    answers = model.generate(**mixed_prompts([9], 128, seed), do_sample=True, max_new_tokens=9, **options)
    assert len({tuple(answer) for answer in answers.tolist()}) == 4
    assert set(decoded) == {8}
    assert_account_is_empty(model)


@pytest.mark.parametrize("cache", ["ours", "theirs"])
def test_a_cache_holds_nothing_of_the_twins(cache, plain, model, reading, seed):
    texts = []
    for own in (plain, model):
        held = own.compiled.new_cache() if own is model and cache == "ours" else DynamicCache(config=plain.config)
        ids = mixed_prompts([7, 7], 128, seed)["input_ids"]
        for scale in (1.5, None, 0.7):
            ids = greedy(own, {"input_ids": ids}, 6, guidance_scale=scale, past_key_values=held)
            ids = torch.cat([ids, torch.tensor([[7, 8]] * 2)], dim=1)
        texts.append(ids)
        assert held.get_seq_length() == ids.shape[1] - 3
    assert torch.equal(*texts)
    del held
    assert_account_is_empty(model)


@pytest.mark.parametrize("name", ["OPT", "BioGpt", "Roberta"])
def test_negative_prompts_are_numbered_as_the_model_numbers_them(name, seed):
    options = {"OPT": {"ffn_dim": 96, "word_embed_proj_dim": 64}, "Roberta": {"is_decoder": True}}.get(name, {})
    plain, wrapped = (make(name, options, 0) for _ in range(2))
    model = compiled_llm.wrap(wrapped, **OPTIONS, progress=False)
    inputs = {**mixed_prompts([9, 4], 128, seed), **negative([2, 6], seed)}
    answers = [greedy(own, inputs, 8, guidance_scale=1.5) for own in (plain, model)]
    assert torch.equal(*answers)
    assert_account_is_empty(model)


def test_negative_prompts_in_sliding_windows(seed):
    plain, wrapped = (tiny_qwen3(eos_token_id=None, **WINDOWS) for _ in range(2))
    model = compiled_llm.wrap(wrapped, **OPTIONS)
    inputs = {**mixed_prompts([9, 4], 128, seed), **negative([2, 14], seed)}
    assert torch.equal(*[greedy(own, inputs, 20, guidance_scale=1.5) for own in (plain, model)])


def _holes(given: dict[str, Tensor]) -> dict[str, Tensor]:
    given["negative_prompt_attention_mask"][:, -3] = 0
    return given


BY_HUGGINGFACE: dict[str, tuple[dict[str, Any], Any]] = {
    "more rows than there is room for": ({"max_batch_size": 3}, lambda given: given),
    "holes in the mask": ({}, _holes),
}


@pytest.mark.parametrize("name", BY_HUGGINGFACE)
def test_what_twins_cannot_do_is_left_to_huggingfaces_processor(name, plain, decoded, seed):
    options, change = BY_HUGGINGFACE[name]
    model = compiled_llm.wrap(tiny_qwen3(eos_token_id=None), **{**OPTIONS, **options})
    inputs = {**mixed_prompts([4, 6, 5], 128, seed), **change(negative([3, 7, 5], seed))}
    assert torch.equal(*[greedy(own, inputs, 9, guidance_scale=1.5) for own in (plain, model)])
    assert set(decoded) == {3}
    assert_account_is_empty(model)


def test_pages_that_do_not_hold_the_twins_are_told_before_anything_runs(plain, decoded, seed):
    model = compiled_llm.wrap(tiny_qwen3(eos_token_id=None), **{**OPTIONS, "kv_memory": "70 tokens"})
    inputs = mixed_prompts([4, 6, 5], 128, seed)
    with pytest.raises(ValueError, match="3 rows of up to 15 tokens need 20 pages of 4 tokens, and 18 of 18"):
        greedy(model, inputs, 9, guidance_scale=1.5)
    assert not decoded
    assert torch.equal(*[greedy(own, inputs, 9) for own in (plain, model)])
    assert_account_is_empty(model)


def test_negative_prompts_of_another_number_fail_as_with_huggingface(plain, model, seed):
    inputs = {**mixed_prompts([4, 6], 128, seed), **negative([3], seed)}
    for own in (plain, model):
        with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
            greedy(own, inputs, 9, guidance_scale=1.5)
    assert_account_is_empty(model)
    inputs = mixed_prompts([4, 6], 128, seed)
    assert torch.equal(*[greedy(own, inputs, 9, guidance_scale=1.5) for own in (plain, model)])
