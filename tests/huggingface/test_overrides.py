"""What a class or an object overrides is in effect: tokens are those of the same model unwrapped, on a slower path."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen3ForCausalLM as Qwen3

import compiled_llm
from support.execution.model_changes import hook_by_accelerate
from support.huggingface.cache_name import CACHE
from support.huggingface.overriding import biased, prefer_tokens, shift_ids, shifted, skip_positions
from support.huggingface.pairs import OPTIONS
from support.parity import assert_account_is_empty, greedy, mixed_prompts
from support.tiny_models import ONE_LAYER, tiny_qwen3

pytestmark = pytest.mark.core

INPUTS = mixed_prompts([4, 9, 6], 128, seed=0)
Change = Callable[[PreTrainedModel], Any]


def wrapped(model: PreTrainedModel) -> PreTrainedModel:
    return compiled_llm.wrap(model, **OPTIONS)


def twins(kind: type | None = None) -> tuple[PreTrainedModel, PreTrainedModel]:
    plain, model = tiny_qwen3(**ONE_LAYER), tiny_qwen3(**ONE_LAYER)
    if kind is not None:
        plain.__class__ = model.__class__ = kind
    return plain, wrapped(model)


def both(change: Change, before: bool) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A model and a wrapped one, changed before or after it was wrapped."""
    plain, model = tiny_qwen3(**ONE_LAYER), tiny_qwen3(**ONE_LAYER)
    change(plain)
    if before:
        change(model)
    wrapped(model)
    if not before:
        change(model)
    return plain, model


def tokens(model: PreTrainedModel, **options: Any) -> Tensor:
    torch.manual_seed(0)
    result = model.generate(**{**INPUTS, "max_new_tokens": 8, "do_sample": False, **options})
    return result if isinstance(result, Tensor) else result.sequences


def assert_same_tokens(plain: PreTrainedModel, model: PreTrainedModel, path: str, reason: str) -> None:
    """Greedy, drawn and with scores; the same numbers are drawn, since the loop is HuggingFace's."""
    scores = {"return_dict_in_generate": True, "output_scores": True}
    for options in ({}, {"do_sample": True}, scores, {"num_beams": 3}):
        torch.testing.assert_close(tokens(model, **options), tokens(plain, **options), msg=str(options))
    stats = model.compiled.stats()
    assert stats.generate_calls[path] == 4
    assert stats.slow_paths[reason] >= 3  # beams have a reason of their own
    if stats.pages is not None:
        assert_account_is_empty(model)


def assert_same_logits(plain: PreTrainedModel, model: PreTrainedModel, path: str) -> None:
    before = model.compiled.stats().forward_calls.get(path, 0)
    with torch.no_grad():
        ours, theirs = model(**INPUTS).logits, plain(**INPUTS).logits
    shown = INPUTS["attention_mask"].bool()
    torch.testing.assert_close(ours[shown], theirs[shown], rtol=1e-4, atol=1e-4)
    assert model.compiled.stats().forward_calls == {path: before + 1}


# ---- what our loops stand in for


class Mine(Qwen3):
    pass


def test_a_method_of_the_class_that_is_replaced_after_a_call_counts(monkeypatch):
    plain, model = twins(Mine)
    first = tokens(model)
    original = Mine.prepare_inputs_for_generation

    @functools.wraps(original)  # which copies the names of HuggingFace's own
    def prepare(self: Any, input_ids: Tensor, **kwargs: Any) -> Any:
        return shifted(original(self, input_ids, **kwargs))

    monkeypatch.setattr(Mine, "prepare_inputs_for_generation", prepare)
    assert not torch.equal(first, tokens(plain))
    torch.testing.assert_close(tokens(model), tokens(plain))


def test_what_is_taken_back_brings_back_the_fast_loop():
    plain, model = twins()
    for change in (shift_ids, skip_positions):
        change(model)
        tokens(model)
        model.prepare_inputs_for_generation = type(model).prepare_inputs_for_generation.__get__(model)  # as PEFT does
        vars(model).pop("_update_model_kwargs_for_generation", None)
        torch.testing.assert_close(tokens(model), tokens(plain))
    assert model.compiled.stats().generate_calls == {"compiled forward": 2, "fast loop": 2}


def test_a_mask_that_pages_do_not_take_goes_on_in_huggingfaces_forward():
    """From the fifth token on, with what the cache holds by then."""

    def mask_in_4d(model: PreTrainedModel) -> None:
        original = model.prepare_inputs_for_generation

        def prepare(input_ids: Tensor, **kwargs: Any) -> Any:
            inputs = original(input_ids, **kwargs)
            seen, new = inputs[CACHE].get_seq_length(), inputs["input_ids"].shape[1]
            if seen > 12:
                mask = torch.ones(len(input_ids), 1, new, seen + new, dtype=torch.bool)
                mask[..., :9] = (
                    INPUTS["attention_mask"].bool()[:, None, None].repeat_interleave(len(input_ids) // 3, dim=0)
                )
                inputs["attention_mask"] = mask
            return inputs

        model.prepare_inputs_for_generation = prepare

    plain, model = both(mask_in_4d, before=False)
    assert_same_tokens(plain, model, "compiled forward", "overrides")
    assert model.compiled.stats().generate_calls["original"] == 4
    assert model.compiled.stats().slow_paths["attention_mask_shape"] == 4


def test_a_cache_that_the_user_gave_is_not_replaced():
    model = twins()[1]
    original = model.prepare_inputs_for_generation
    model.prepare_inputs_for_generation = lambda input_ids, **kwargs: {
        **original(input_ids, **kwargs),
        "attention_mask": torch.ones(3, 1, 9, 9, dtype=torch.bool).tril(),
    }
    options: dict[str, Any] = {"max_new_tokens": 3, "past_key_values": model.compiled.new_cache()}
    with pytest.raises(ValueError, match="forward with a PagedCache"):
        model.generate(INPUTS["input_ids"], attention_mask=INPUTS["attention_mask"], **options)


def test_more_tokens_than_generate_was_given_pages_for(seed):
    """Virtual tokens are not in the prompt; where no pages are left for them, HuggingFace's own cache holds all."""

    def prepend(model: PreTrainedModel) -> None:
        original = model.prepare_inputs_for_generation

        def prepare(input_ids: Tensor, **kwargs: Any) -> Any:
            inputs = original(input_ids, **kwargs)
            if not inputs[CACHE].get_seq_length():
                ids = torch.cat([torch.arange(3, 43)[None].expand(len(input_ids), -1), inputs["input_ids"]], dim=1)
                return {**inputs, "input_ids": ids, "attention_mask": None, "position_ids": None}
            return {**inputs, "attention_mask": None, "position_ids": None}

        model.prepare_inputs_for_generation = prepare

    plain = tiny_qwen3(**ONE_LAYER)
    model = compiled_llm.wrap(tiny_qwen3(**ONE_LAYER), **{**OPTIONS, "kv_memory": "60 tokens"})
    ids = mixed_prompts([6, 6], 128, seed)["input_ids"]
    for either in (plain, model):
        prepend(either)
    torch.testing.assert_close(
        model.generate(ids, max_new_tokens=4, do_sample=False), plain.generate(ids, max_new_tokens=4, do_sample=False)
    )
    assert model.compiled.stats().slow_paths == {"overrides": 1, "out_of_pages": 1}
    assert_account_is_empty(model)


# ---- a forward of one's own


def compile_in_place(model: PreTrainedModel) -> None:
    model.compile(backend="eager")


def compile_forward(model: PreTrainedModel) -> None:
    model.forward = torch.compile(model.forward, backend="eager")


@pytest.mark.parametrize("change", [prefer_tokens, hook_by_accelerate])
@pytest.mark.parametrize("before", [True, False], ids=["before wrap", "after"])
def test_a_forward_of_ones_own_comes_to_ours_if_it_is_replaced_after_wrap(change, before):
    assert_same_logits(*both(change, before), "original" if before else "compiled")


@pytest.mark.parametrize("change", [compile_in_place, compile_forward])
@pytest.mark.parametrize("before", [True, False], ids=["before wrap", "after"])
def test_a_forward_that_the_user_compiles_is_the_one_that_runs(change, before):
    with torch.compiler.set_stance("force_eager"):  # Dynamo would take a minute
        plain, model = both(change, before)
        assert_same_tokens(plain, model, "original", "own_forward")


@pytest.mark.whole
def test_a_forward_that_the_user_compiles_is_traced_as_huggingfaces():
    torch._dynamo.reset()
    plain, model = twins()
    compile_in_place(model)
    assert_same_logits(plain, model, "original")
    options = {"max_new_tokens": 1, "num_beams": 2}
    torch.testing.assert_close(tokens(model, **options), tokens(plain, **options))
    assert model.compiled.stats().slow_paths == {"own_forward": 1, "forward: own_forward": 1}


@pytest.mark.whole
def test_what_dynamo_has_given_up_on_is_not_compiled_by_us():
    """Dynamo then tries each function that runs by itself, and ours cannot be compiled."""
    torch._dynamo.reset()
    plain, model = twins()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="pass a DynamicCache"):
            compiled(**INPUTS, past_key_values=model.compiled.new_cache())
        ours, theirs = compiled(**INPUTS).logits, plain(**INPUTS).logits
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("before", [True, False], ids=["before wrap", "after"])
def test_without_accelerates_hooks_the_model_is_fast_again(before):
    from accelerate.hooks import remove_hook_from_module

    plain, model = both(hook_by_accelerate, before)
    tokens(model)
    for either in (plain, model):
        remove_hook_from_module(either)
    torch.testing.assert_close(tokens(model), tokens(plain))
    torch.testing.assert_close(tokens(model, num_beams=2), tokens(plain, num_beams=2))
    assert model.compiled.stats().generate_calls == {"original": 1, "fast loop": 1, "compiled forward": 1}
    assert_same_logits(plain, model, "compiled")
    compiled_llm.unwrap(model)
    torch.testing.assert_close(tokens(model), tokens(plain))


class Forwards(Qwen3):
    def forward(self, input_ids: Any = None, logits_to_keep: Any = 0, **kwargs: Any) -> Any:
        return biased(super().forward(input_ids=input_ids, logits_to_keep=logits_to_keep, **kwargs))


def test_the_forward_of_a_class_is_compiled():
    plain, model = twins(Forwards)
    torch.testing.assert_close(greedy(model, INPUTS, 8), greedy(plain, INPUTS, 8))
    assert model.compiled.stats().generate_calls == {"fast loop": 1}


# ---- what the model's config asks of every forward, and a head of one's own


@pytest.mark.parametrize("width", [128, 100])
def test_a_head_of_several_layers(width):
    torch.manual_seed(0)
    layers = nn.Linear(64, 64), nn.Linear(64, width, bias=False)
    nn.init.normal_(layers[1].weight, std=0.2)
    plain, model = twins()
    torch.testing.assert_close(tokens(model), tokens(plain))
    for either in (plain, model):
        either.lm_head = nn.Sequential(*layers)
    torch.testing.assert_close(tokens(model), tokens(plain))
    if width == plain.config.vocab_size:  # older versions of HuggingFace's beam search go by the config
        torch.testing.assert_close(tokens(model, num_beams=2), tokens(plain, num_beams=2))
    assert_same_logits(plain, model, "compiled")
