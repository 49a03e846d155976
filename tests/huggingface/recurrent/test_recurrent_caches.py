"""Caches of models with recurrent layers go on after each kind of end, as HuggingFace's rows alone do."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import DynamicCache, StoppingCriteriaList

import compiled_llm
from compiled_llm.kvcache.errors import OutOfStatesError
from support.characters import character_tokenizer
from support.execution.callbacks import Callback
from support.huggingface.callbacks import Raising, Until
from support.huggingface.recurrent_families import recurrent_model
from support.huggingface.recurrent_pairs import (
    PAD,
    left_padded,
    new_tokens_of,
    of_rows_alone,
    plain_family,
    poison_released_states,
    prompts_of,
    wrapped_family,
)
from support.parity import assert_account_is_empty

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("one_thread")]

CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}
KINDS = ["Lfm2", "Qwen3_5", "Jamba", "GraniteMoeHybrid"]
"""A short convolution, a delta net, Mamba 1 and Mamba 2."""


def begun(model: Any, prompts: list[list[int]], new: int = 6, cache: Any = None, **options: Any) -> Any:
    """What `generate` returns, with its cache."""
    return model.generate(
        **left_padded(prompts), max_new_tokens=new, do_sample=False, pad_token_id=PAD, past_key_values=cache,
        **{"eos_token_id": None, "return_dict_in_generate": True, **options},
    )  # fmt: skip


def texts(prompts: list[list[int]], out: Any) -> list[list[int]]:
    width = max(map(len, prompts))
    return [prompt + row[width:].tolist() for prompt, row in zip(prompts, out.sequences, strict=True)]


def assert_goes_on(family: str, model: Any, cache: Any, so_far: list[list[int]], seed: int, new: int = 7) -> None:
    """Text that a cache has, and more words: the answer is that of rows alone."""
    said = [text + words for text, words in zip(so_far, prompts_of([3] * len(so_far), seed + 5), strict=True)]
    out = begun(model, said, new, cache)
    assert out.past_key_values is cache
    width = max(map(len, said))
    assert [row[width:].tolist() for row in out.sequences] == of_rows_alone(family, said, new)


def assert_nothing_left(model: Any) -> None:
    gc.collect()
    assert_account_is_empty(model)


def end_by_length(model: Any, prompt: list[int], cache: Any) -> list[int]:
    return texts([prompt], begun(model, [prompt], 6, cache))[0]


def end_by_eos(model: Any, prompt: list[int], cache: Any) -> list[int]:
    token = new_tokens_of(model, [prompt], 8, eos_token_id=None)[0][4]
    return texts([prompt], begun(model, [prompt], 20, cache, eos_token_id=token))[0]


def end_by_stop_string(model: Any, prompt: list[int], cache: Any) -> list[int]:
    tokenizer = character_tokenizer()
    text = new_tokens_of(model, [prompt], 8, eos_token_id=None)[0]
    stop = tokenizer.decode(text[3:5])
    return texts([prompt], begun(model, [prompt], 20, cache, stop_strings=[stop], tokenizer=tokenizer))[0]


def end_by_criterion(model: Any, prompt: list[int], cache: Any) -> list[int]:
    return texts([prompt], begun(model, [prompt], 20, cache, stopping_criteria=StoppingCriteriaList([Until()])))[0]


def end_by_streamer(model: Any, prompt: list[int], cache: Any) -> list[int]:
    with pytest.raises(LookupError):
        begun(model, [prompt], 20, cache, streamer=Raising(5, LookupError))
    return prompt


def end_by_interrupt(model: Any, prompt: list[int], cache: Any) -> list[int]:
    """The way in which a call is cancelled."""
    with pytest.raises(KeyboardInterrupt):
        begun(model, [prompt], 20, cache, streamer=Raising(6, KeyboardInterrupt))
    return prompt


def end_after_new_weights(model: Any, prompt: list[int], cache: Any) -> list[int]:
    """They are the same numbers in other tensors, which is a change to whoever looks."""

    def change() -> None:
        weight = model.lm_head.weight
        model.lm_head.weight = torch.nn.Parameter(weight.detach().clone())

    return texts([prompt], begun(model, [prompt], 9, cache, streamer=Callback(change)))[0]


ENDS: dict[str, Callable[[Any, list[int], Any], list[int]]] = {
    "length": end_by_length,
    "eos": end_by_eos,
    "stop string": end_by_stop_string,
    "criterion": end_by_criterion,
    "a streamer that raises": end_by_streamer,
    "cancel": end_by_interrupt,
    "new weights": end_after_new_weights,
}


@pytest.mark.drawn(most=2)
@pytest.mark.parametrize("length", [5, 18])
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("family", [*KINDS, "FalconH1", "KimiLinear"])
def test_a_cache_goes_on_after_each_kind_of_end(
    family: str, end: str, length: int, reading: None, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, (prompt,) = wrapped_family(family), prompts_of([length], seed)
    poison_released_states(model, monkeypatch)
    cache = model.compiled.new_cache()
    first = end_by_length(model, prompt, cache)  # so that a call that fails leaves something
    text = ENDS[end](model, [*first, 7, 8], cache)
    assert text[: len(first)] == first
    assert_goes_on(family, model, cache, [text], seed)
    cache.close()
    assert_nothing_left(model)


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("family", KINDS[:2])
def test_rows_that_ended_early_begin_again_without_their_pads(family: str, reading: None, seed: int) -> None:
    """Pads are in their states; where a mask hides them, the row alone is the measure."""
    model, prompts = wrapped_family(family), prompts_of([9, 9], seed)
    expected = of_rows_alone(family, prompts, 16)
    ends = [token for token in expected[0][3:6] if token not in expected[1]][:1]
    out = begun(model, prompts, 12, eos_token_id=ends)
    words = torch.tensor([[7, 8], [9, 7]])
    ids = torch.cat([out.sequences, words], dim=1)
    mask = (ids != PAD).long()
    assert not mask.all()
    again = model.generate(
        ids, attention_mask=mask, past_key_values=out.past_key_values, do_sample=False, max_new_tokens=6,
        eos_token_id=None, pad_token_id=PAD,
    )  # fmt: skip
    visible = [row[shown.bool()].tolist() for row, shown in zip(ids, mask, strict=True)]
    assert again[:, ids.shape[1] :].tolist() == of_rows_alone(family, visible, 6)
    del out
    assert_nothing_left(model)


def test_a_cache_cannot_be_cropped_and_goes_on(seed: int) -> None:
    model, prompts = wrapped_family("Lfm2"), prompts_of([9, 6], seed)
    out = begun(model, prompts)
    cache = out.past_key_values
    assert not any(layer.is_croppable for layer in cache.layers)
    before = cache.get_seq_length()
    with pytest.raises(ValueError, match=r"crop: tokens_to_remove=-2: layer 0 is recurrent, and has no"):
        cache.crop(-2)
    cache.crop(0)
    assert cache.get_seq_length() == before
    assert_goes_on("Lfm2", model, cache, texts(prompts, out), seed)
    cache.crop(-cache.get_seq_length())
    assert cache.get_seq_length() == 0
    assert_goes_on("Lfm2", model, cache, prompts, seed)
    del cache, out
    assert_nothing_left(model)


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("words", [[], [5, 6]], ids=["one token", "more"])
def test_copies_of_a_cache_go_on_for_themselves(words: list[int], seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts = wrapped_family("Qwen3_5"), prompts_of([9, 17], seed)
    poison_released_states(model, monkeypatch)
    out = begun(model, prompts)
    caches = [out.past_key_values, copy.deepcopy(out.past_key_values), copy.deepcopy(out.past_key_values)]
    said = [text + words for text in texts(prompts, out)]
    expected = of_rows_alone("Qwen3_5", said, 7)
    again: list[list[int]] = []
    for cache in reversed(caches):
        again = texts(said, begun(model, said, 7, cache))
        assert [text[-7:] for text in again] == expected
    for cache in caches:
        assert_goes_on("Qwen3_5", model, cache, again, seed)
        cache.close()
    del out
    assert_nothing_left(model)


@pytest.mark.skipif(Version(transformers.__version__) < Version("5.23"), reason="its masks do not cover the cache")
@pytest.mark.parametrize("family", KINDS[:2])
def test_a_cache_that_holds_every_token_says_what_to_do(
    family: str, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """HuggingFace's answer is given meanwhile; what is advised gives it in the fast loop."""
    model, plain, (prompt,) = wrapped_family(family), plain_family(family), prompts_of([9], seed)
    ids, options = torch.tensor([prompt]), {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    caches: list[Any] = [DynamicCache(config=plain.config), model.compiled.new_cache()]
    with torch.no_grad():
        plain(ids, past_key_values=caches[0])
        model(ids[:, :-1], past_key_values=caches[1])
        before_the_last = copy.deepcopy(caches[1])
        model(ids[:, -1:], past_key_values=caches[1])
    answers = [
        own.generate(ids, past_key_values=cache, **options) for own, cache in zip((plain, model), caches, strict=True)
    ]
    assert torch.equal(*answers)
    assert model.compiled.stats().slow_paths == {"no_new_tokens": 1}
    assert "With recurrent layers, whose states have no earlier tokens, crop raises" in caplog.text
    with pytest.raises(ValueError, match="crop"):
        caches[1].crop(-1)
    for cache in (before_the_last, None):
        answer = model.generate(ids, past_key_values=cache, **options)
        assert answer[:, 9:].tolist() == of_rows_alone(family, [prompt], 6)
    assert dict(model.compiled.stats().generate_calls) == {"compiled forward": 1, "fast loop": 2}
    for cache in (caches[1], before_the_last):
        cache.close()
    assert_nothing_left(model)


CHANGES: dict[str, tuple[Callable[[Any], None], list[int]]] = {
    "reordered": (lambda cache: cache.reorder_cache(torch.tensor([2, 2, 0])), [2, 2, 0]),
    "repeated": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    "selected": (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_rows_of_a_cache_are_chosen(change: str, seed: int) -> None:
    model, prompts = wrapped_family("Lfm2"), prompts_of([9, 9, 9], seed)
    out = begun(model, prompts)
    make, chosen = CHANGES[change]
    make(out.past_key_values)
    rows = [texts(prompts, out)[row] for row in chosen]
    assert_goes_on("Lfm2", model, out.past_key_values, rows, seed)
    del out
    assert_nothing_left(model)


@pytest.mark.parametrize("family", KINDS)
def test_a_cache_that_is_handed_over_holds_huggingfaces_states(family: str, seed: int) -> None:
    model, prompts = wrapped_family(family), prompts_of([18, 18], seed)
    out = begun(model, prompts, 4)
    text = out.sequences[:, :-1]
    theirs: Any = out.past_key_values.handed_over(model.config)
    expected: Any = plain_family(family)(text, use_cache=True).past_key_values
    assert isinstance(theirs, DynamicCache)
    for own, wanted in zip(theirs.layers, expected.layers, strict=True):
        assert type(own) is type(wanted)
        for name in ("keys", "values"):
            if getattr(wanted, name, None) is not None:
                torch.testing.assert_close(getattr(own, name), getattr(wanted, name), **CLOSE)
        for name in ("conv_states", "recurrent_states"):
            for number, state in getattr(wanted, name, {}).items():
                if state is not None:
                    torch.testing.assert_close(getattr(own, name)[number], state, **CLOSE)
    with torch.no_grad():
        last = out.sequences[:, -1:]
        logits = plain_family(family)(last, past_key_values=theirs).logits
        torch.testing.assert_close(logits, plain_family(family)(out.sequences).logits[:, -1:], rtol=1e-3, atol=1e-3)
    del out
    assert_nothing_left(model)


def test_a_call_that_fails_in_its_prompt_can_be_made_again(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from compiled_llm.execution.prefill.launches import PrefillLaunches
    from support.execution.failing_calls import fail_once

    model, prompts = wrapped_family("Qwen3_5"), prompts_of([9, 37], seed)
    out = begun(model, prompts)
    for number, done in ((1, False), (1, True), (2, False), (3, True)):
        said = [text + [7] * 25 for text in texts(prompts, out)]
        with monkeypatch.context() as patch:
            fail_once(patch, PrefillLaunches, "_launch", RuntimeError("planted"), number, done)
            with pytest.raises(RuntimeError, match="planted"):
                begun(model, said, 4, out.past_key_values)
    assert_goes_on("Qwen3_5", model, out.past_key_values, texts(prompts, out), seed)
    del out
    assert_nothing_left(model)


def test_models_are_copied_and_unwrapped_with_their_states(seed: int) -> None:
    model, prompts = wrapped_family("Lfm2"), prompts_of([9], seed)
    expected = of_rows_alone("Lfm2", prompts, 6)
    for own in (model, copy.deepcopy(model), compiled_llm.unwrap(model)):
        assert new_tokens_of(own, prompts, 6, eos_token_id=None) == expected
    classes = [{type(module) for module in own.modules()} for own in (model, recurrent_model("Lfm2"))]
    assert classes[0] == classes[1]


@pytest.mark.parametrize(
    "change", [copy.deepcopy, lambda cache: cache.batch_repeat_interleave(2)], ids=["copied", "repeated"]
)
def test_where_states_run_out_nothing_leaks(change: Callable[[Any], Any], seed: int) -> None:
    model, prompts = wrapped_family("Qwen3_5"), prompts_of([9, 17, 4], seed)
    out = begun(model, prompts)
    cache, so_far = out.past_key_values, texts(prompts, out)
    states = model.compiled.model_runner().pool.states
    left = states.available
    states.reserve(left - 5)  # a row and its copy need four
    with pytest.raises(OutOfStatesError) as kept:
        change(cache)
    # The row that was copied keeps the two that it may need to go on.
    assert states.available == 3, f"copies made before wait for whoever keeps {kept}"
    del kept
    states.give_back(reserved=left - 5)
    assert_goes_on("Qwen3_5", model, cache, so_far, seed)
    cache.close()
    del out
    assert_nothing_left(model)
