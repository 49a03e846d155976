"""Beams, drafts and copies over pages: promised, shared, copied when written, given back, and never compiled again."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StoppingCriteriaList

import compiled_llm
from compiled_llm.compilation import backend as inductor
from compiled_llm.execution.prefill.prefill import Prefill
from compiled_llm.execution.state.runner_state import RunnerState
from compiled_llm.kvcache.pool import PagePool
from compiled_llm_ops.reference.backend import Reference
from support.execution.callbacks import Callback
from support.huggingface.repeating import repeating
from support.noting import note_calls
from support.parity import assert_account_is_empty, greedy, mixed_prompts, next_turn
from support.tiny_models import tiny_qwen3

OPTIONS: dict[str, Any] = {"page_size": 4, "kv_memory": "1000 tokens", "max_batch_size": 8, "progress": False}


def wrapped_in(mode: str, **overrides: Any) -> PreTrainedModel:
    return compiled_llm.wrap(tiny_qwen3(**{"eos_token_id": None, **overrides}), mode=mode, **OPTIONS)


@pytest.fixture
def plain() -> PreTrainedModel:
    return tiny_qwen3(eos_token_id=None)


@pytest.fixture
def model() -> PreTrainedModel:
    return wrapped_in("eager")


class Watched:
    """What happens to pages while calls run."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._used = note_calls(patch, PagePool, "give_back", lambda pool, *_: pool.account().used)
        self._copied = note_calls(patch, RunnerState, "copy_pages", lambda self, copies: len(copies))
        self.computed = note_calls(patch, Prefill, "run", lambda self, batch, *_, **__: sum(len(e.ids) for e in batch))

    @property
    def peak_used(self) -> int:
        return max(self._used)

    @property
    def copied(self) -> int:
        return sum(self._copied)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


# ---- beams


@pytest.mark.drawn(most=2)
@pytest.mark.core
@pytest.mark.parametrize("lengths", [[7], [4, 9]])
@pytest.mark.parametrize("beams", [2, 4])
def test_beams_share_the_prompt_and_copy_no_more_than_the_page_they_write(beams, lengths, plain, model, watched, seed):
    inputs, new = mixed_prompts(lengths, 128, seed), 30
    options = {"num_beams": beams, "num_return_sequences": beams, "output_scores": True}
    theirs, ours = (greedy(own, inputs, new, return_dict_in_generate=True, **options) for own in (plain, model))
    torch.testing.assert_close(ours.sequences, theirs.sequences)
    torch.testing.assert_close(ours.sequences_scores, theirs.sequences_scores, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.beam_indices, theirs.beam_indices)
    assert watched.computed == [sum(lengths)]  # once, not once a beam
    assert 0 < watched.copied < (new - 1) * beams * len(lengths)
    alone = sum(-(-(length + new) // 4) for length in lengths)
    assert watched.peak_used < beams * alone
    del ours
    gc.collect()
    assert_account_is_empty(model)


def test_the_cache_of_a_beam_search_is_as_long_as_huggingfaces_and_goes_on(plain, model, seed):
    inputs = mixed_prompts([4, 9], 128, seed)
    results = []
    for own in (plain, model):
        out = greedy(own, inputs, 9, num_beams=2, num_return_sequences=2, return_dict_in_generate=True)
        cache = out.past_key_values
        length = cache.get_seq_length()
        with torch.no_grad():
            mask = torch.ones(4, length + 3, dtype=torch.long)
            mask[:, :9] = inputs["attention_mask"].repeat_interleave(2, 0)
            position = mask.cumsum(1)[:, -3:] - 1
            more = torch.tensor([[5, 6, 7]] * 4)
            results.append(own(more, mask, position, past_key_values=cache).logits)
        assert length == 9 + 8
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_beams", [3, 1])
def test_more_beams_than_rows_or_pages_are_refused_before_anything_is_computed(num_beams, model, seed, watched):
    new = 20 if num_beams > 1 else 400
    inputs = mixed_prompts([4] * 3, 128, seed)
    with pytest.raises(ValueError, match=r"9 beams \(num_beams=3\) are more than max_batch_size=8|need \d+ pages"):
        greedy(model, inputs, new, num_beams=num_beams)
    assert watched.computed == []
    assert_account_is_empty(model)


class StopError(Exception):
    pass


def test_a_beam_search_that_raises_gives_its_pages_back(model, seed):
    def raising(batch: int, ids: Tensor) -> list[int]:
        if len(ids) > 12:
            raise StopError
        return list(range(3, 128))

    with pytest.raises(StopError):
        greedy(model, mixed_prompts([4, 9], 128, seed), 20, num_beams=3, prefix_allowed_tokens_fn=raising)
    gc.collect()
    assert_account_is_empty(model)


# ---- drafts


@pytest.mark.whole
@pytest.mark.core
def test_wrong_drafts_give_their_pages_back(plain, seed, watched):
    """A draft model of other weights is mostly wrong: each round is cropped by most of what it stored."""
    model, helper = wrapped_in("eager"), tiny_qwen3(seed=1, eos_token_id=None)
    helper.generation_config.num_assistant_tokens = 9
    helper.generation_config.num_assistant_tokens_schedule = "constant"
    helper.generation_config.assistant_confidence_threshold = 0.0
    inputs, new = mixed_prompts([6], 128, seed), 40
    expected = greedy(plain, inputs, new)
    torch.testing.assert_close(greedy(model, inputs, new, assistant_model=helper), expected)
    assert len(watched.computed) > new // 2
    assert max(watched.computed[1:]) == 1 + 9
    assert watched.peak_used <= -(-(6 + new + 9) // 4)
    assert_account_is_empty(model)


def test_right_drafts_are_taken_several_at_a_time_with_a_wrapped_model_on_either_side(plain, seed):
    model, helper = wrapped_in("eager"), wrapped_in("eager")  # of the same weights
    inputs, new = mixed_prompts([6], 128, seed), 40
    expected = greedy(plain, inputs, new)
    for main, drafting in ((model, plain), (plain, helper), (model, helper)):
        torch.testing.assert_close(greedy(main, inputs, new, assistant_model=drafting), expected)
    assert model.compiled.stats().generate_calls == {"compiled forward": 2}
    assert helper.compiled.stats().generate_calls.keys() == {"fast loop"}
    gc.collect()
    for own in (model, helper):
        assert_account_is_empty(own)


@pytest.mark.whole
def test_a_pad_in_an_answer_is_a_token_to_a_draft_model(plain, seed):
    """HuggingFace gives it no mask where its caller hides nothing, and it would be found among the ids."""
    model, helper = wrapped_in("eager"), wrapped_in("eager")
    inputs = mixed_prompts([6], 128, seed)
    expected = greedy(plain, inputs, 20)
    pads = [token for token in dict.fromkeys(expected[0, 6:].tolist()) if token not in inputs["input_ids"]]
    for pad in pads[:4]:
        for given in (inputs, {"input_ids": inputs["input_ids"]}):
            found = greedy(model, {**given, "pad_token_id": pad}, 20, assistant_model=helper)
            torch.testing.assert_close(found, expected)
    assert helper.compiled.stats().generate_calls.keys() == {"fast loop"}


# ---- pages are promised before a loop begins, HuggingFace's loops included

ONE, TWO = [9], [9, 6]
LOOPS: dict[str, tuple[list[int], dict[str, Any]]] = {
    "beams": (TWO, {"num_beams": 3}),
    "beams returned": (ONE, {"num_beams": 4, "num_return_sequences": 4}),
    "embedded beams": (TWO, {"num_beams": 3, "inputs_embeds": True}),
    "sampled beams": (TWO, {"num_beams": 2, "do_sample": True}),
    "draft model": (ONE, {"assistant_model": True}),
    "positions": (TWO, {"position_ids": 2 * torch.arange(9)[None].expand(2, -1)}),
    "copies": (TWO, {"do_sample": True, "num_return_sequences": 3}),
    "copies with processors": (TWO, {"do_sample": True, "num_return_sequences": 3, "typical_p": 0.9}),
}


def run_loop(model: PreTrainedModel, name: str, seed: int, **options: Any) -> Tensor:
    lengths, given = LOOPS[name]
    inputs, given = mixed_prompts(lengths, 128, seed), dict(given)
    inputs["input_ids"][:, -4:] = torch.tensor([5, 6, 5, 6])  # something to look up
    if "assistant_model" in given:
        given["assistant_model"] = tiny_qwen3(seed=1, eos_token_id=None)
    if "inputs_embeds" in given:
        given["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids")).detach()
    torch.manual_seed(seed)
    return model.generate(**{"max_new_tokens": 22, "do_sample": False, **inputs, **given, **options})


def with_pages(count: int) -> PreTrainedModel:
    options = {**OPTIONS, "kv_memory": f"{4 * count} tokens"}
    return compiled_llm.wrap(tiny_qwen3(eos_token_id=None), mode="eager", **options)


@cache
def by_itself(name: str, seed: int) -> tuple[Tensor, int]:
    """What a loop writes where there are many pages, and how many it was promised."""
    model = with_pages(250)
    pool, available = model.compiled.model_runner().pool, []
    look = StoppingCriteriaList([Callback(lambda: available.append(pool.available))])
    tokens = run_loop(model, name, seed, stopping_criteria=look)
    assert len(available) > 5
    assert len(set(available)) == 1, "others have as many pages at each step"
    assert_account_is_empty(model)
    return tokens, pool.total - available[0]


@pytest.mark.drawn(most=1)
@pytest.mark.core
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_needs_no_page_beyond_those_it_was_promised(name, seed, watched):
    expected, needed = by_itself(name, seed)
    tight = with_pages(needed)
    pool = tight.compiled.model_runner().pool
    assert pool.total == needed
    torch.testing.assert_close(run_loop(tight, name, seed), expected)
    watched.computed.clear()
    pool.reserve(1)
    with pytest.raises(ValueError, match=f"need {needed} pages"):
        run_loop(tight, name, seed)
    pool.give_back((), 1)
    assert watched.computed == []
    assert_account_is_empty(tight)


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_waits_for_one_that_leaves_too_few_pages(name, seed):
    """There are pages for one and a half; without a promise both would begin, and one run out midway."""
    expected, needed = by_itself(name, seed)
    shared, order = with_pages(3 * needed // 2), []

    def call(number: int) -> Tensor:
        look = Callback(lambda: (order.append(number), time.sleep(0.002)))
        return run_loop(shared, name, seed, stopping_criteria=[look])

    with ThreadPoolExecutor(2) as threads:
        for tokens in threads.map(call, range(2)):
            assert tokens.shape == expected.shape
            if "do_sample" not in LOOPS[name][1]:
                torch.testing.assert_close(tokens, expected)
    assert order in (sorted(order), sorted(order, reverse=True)), "one after the other"
    assert_account_is_empty(shared)


def test_a_loop_inside_a_callback_that_finds_too_few_pages_is_refused_before_it_begins(seed, watched):
    model = with_pages(50)
    refused: list[str] = []

    def call_again() -> None:
        before = list(watched.computed)
        with pytest.raises(ValueError, match=r"need \d+ pages") as caught:
            run_loop(model, "beams", seed)
        refused.append(str(caught.value))
        assert watched.computed == before

    run_loop(model, "beams", seed, stopping_criteria=[Callback(call_again)])
    assert len(refused) == 22
    assert_account_is_empty(model)


def test_beams_that_go_on_from_a_cache_are_promised_their_pages(plain, model, seed):
    results = []
    for own in (plain, model):
        cache = DynamicCache(config=plain.config) if own is plain else own.compiled.new_cache()
        ids = mixed_prompts([9, 9], 128, seed)["input_ids"].repeat_interleave(3, 0)
        with torch.no_grad():
            own(ids, past_key_values=cache)
        available: list[int] = []
        look = Callback(
            lambda own=own, out=available: own is plain or out.append(own.compiled.model_runner().pool.available)
        )
        text = torch.cat([ids, torch.full((6, 3), 7)], dim=1)[::3]
        results.append(
            greedy(own, {"input_ids": text}, 20, num_beams=3, past_key_values=cache, stopping_criteria=[look])
        )
        assert len(set(available)) == (own is model)
        del cache
    torch.testing.assert_close(results[1], results[0])
    gc.collect()
    assert_account_is_empty(model)


# ---- copies of a prompt


@pytest.mark.drawn(most=3)
@pytest.mark.parametrize("length", [3, 4, 5, 8, 21])
@pytest.mark.parametrize("options", [{}, {"no_repeat_ngram_size": 3}], ids=["fast loop", "processed loop"])
def test_copies_of_a_prompt_share_its_pages(length, options, plain, model, watched, seed):
    """Greedy ones, which HuggingFace has only where the user repeats rows: each is HuggingFace's."""
    inputs = mixed_prompts([length, 2, length + 3], 128, seed)
    inputs = {name: value[[0, 1, 0, 2, 0]] for name, value in inputs.items()}
    inputs["attention_mask"][2] = inputs["input_ids"][2] != 0  # a copy of the mask, not of the storage
    expected, ours = (greedy(own, inputs, 19, **options) for own in (plain, model))
    torch.testing.assert_close(ours, expected)
    rest = (length - 1) % 4 + 1
    assert watched.computed == [2 * length + 3 + 2 + 2 * rest]
    assert_account_is_empty(model)


def test_rows_of_equal_tokens_and_other_padding_are_copies(plain, model, watched, seed):
    prompt = mixed_prompts([9], 128, seed)["input_ids"][0]
    inputs = {"input_ids": torch.zeros(2, 12, dtype=torch.long), "attention_mask": torch.zeros(2, 12, dtype=torch.long)}
    for row, places in enumerate(([*range(3, 12)], [0, 1, 4, 5, 6, 8, 9, 10, 11])):
        inputs["input_ids"][row, places] = prompt
        inputs["attention_mask"][row, places] = 1
    torch.testing.assert_close(greedy(model, inputs, 15), greedy(plain, inputs, 15))
    assert watched.computed == [9 + 1]


@pytest.mark.core
@pytest.mark.parametrize("options", [{}, {"watermarking_config": {"bias": 2.5}}], ids=["fast loop", "processed loop"])
def test_sampled_copies_draw_each_for_itself(options, model, watched, seed):
    inputs, texts = mixed_prompts([13, 5], 128, seed), []
    for _ in range(2):
        torch.manual_seed(seed)
        texts.append(
            model.generate(
                **inputs, do_sample=True, num_return_sequences=4, max_new_tokens=9, top_k=0, temperature=2.0, **options
            )
        )
    assert torch.equal(*texts)
    for copies in texts[0][:, 13:].view(2, 4, 9):
        assert len({tuple(copy.tolist()) for copy in copies}) == 4
        assert len(set(copies[:, 0].tolist())) > 1
    assert watched.computed == [13 + 5 + 3 * (1 + 1)] * 2
    assert_account_is_empty(model)


# ---- compiled


@pytest.fixture(scope="module")
def compiled() -> Iterator[PreTrainedModel]:
    model = wrapped_in("compile")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inductor, "compile_with_inductor", lambda module, inputs, options: module.forward)
        model.compiled.warmup([1, 2, 4, 8])
    yield model
    compiled_llm.unwrap(model)


def chat(model: PreTrainedModel, inputs: dict[str, Tensor]) -> Tensor:
    """Four turns over one cache; rows that begin as copies go on with words of their own."""
    given: dict[str, Any] = inputs
    for turn in range(4):
        out = greedy(model, given, 5 + turn, return_dict_in_generate=True)
        given = next_turn(given, out, torch.arange(7, 10) + torch.arange(len(out.sequences))[:, None])
    return given["input_ids"]


MODES = {
    "beams": lambda model, one, many: greedy(model, many, 12, num_beams=3),
    "beams of one row": lambda model, one, many: greedy(model, one, 12, num_beams=5, num_return_sequences=4),
    "sampled beams": lambda model, one, many: model.generate(**many, max_new_tokens=9, num_beams=2, do_sample=True),
    "prompt lookup": lambda model, one, many: greedy(model, one, 30, prompt_lookup_num_tokens=4),
    "draft model": lambda model, one, many: greedy(
        model, one, 30, assistant_model=tiny_qwen3(seed=1, eos_token_id=None)
    ),
    "guidance": lambda model, one, many: greedy(model, many, 8, guidance_scale=1.4),
    "copies": lambda model, one, many: greedy(model, {name: own[[0, 1, 0, 1]] for name, own in many.items()}, 12),
    "copies of one row": lambda model, one, many: greedy(model, {name: own[[0] * 4] for name, own in one.items()}, 12),
    "chat": lambda model, one, many: chat(model, many),
    "chat of copies": lambda model, one, many: chat(model, {name: own[[0, 0, 1, 1]] for name, own in many.items()}),
    "chat of one": lambda model, one, many: chat(model, one),
    "scoring": lambda model, one, many: model(**many, use_cache=False).logits[many["attention_mask"] != 0],
    "no cache": lambda model, one, many: greedy(model, many, 6, use_cache=False),
}


def score(model: PreTrainedModel) -> None:
    with torch.no_grad():
        model(**mixed_prompts([2, 6], 128, 0), use_cache=False)


def look_up(model: PreTrainedModel) -> None:
    greedy(model, mixed_prompts([6], 128, 0), 30, prompt_lookup_num_tokens=4)


COMPILED_ON_DEMAND = {"scoring": score, "no cache": score, "prompt lookup": look_up}
"""What calls the program of a mode that no warm-up compiles; in a first trial, if it drafts."""


@pytest.mark.drawn(most=2)
@pytest.mark.slow
@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize("mode", MODES)
def test_modes_compile_nothing_anew(mode, compiled, plain, seed):
    call = MODES[mode]
    if mode in COMPILED_ON_DEMAND:
        COMPILED_ON_DEMAND[mode](compiled)
    before = compiled.compiled.graphs
    with torch.compiler.set_stance("fail_on_recompile"), torch.no_grad():
        for lengths in ([3, 8], [5, 1]):
            one, many = mixed_prompts(lengths[:1], 128, seed), mixed_prompts(lengths, 128, seed)
            torch.manual_seed(seed)
            ours = call(compiled, one, many)
            torch.manual_seed(seed)
            theirs = call(plain, one, many)
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert compiled.compiled.graphs == before
    stats = compiled.compiled.stats()
    assert (stats.graph_breaks, stats.recompiles, stats.cudagraph_skips) == (0, 0, 0)
    gc.collect()
    assert_account_is_empty(compiled)


@pytest.mark.whole
@pytest.mark.slow
@pytest.mark.usefixtures("without_inductor")
def test_a_compiled_draft_model_compiles_nothing_anew(compiled, plain, seed):
    helper = wrapped_in("compile", seed=1)
    expected = [greedy(plain, mixed_prompts([length], 128, seed), 25) for length in (6, 3)]
    inputs = mixed_prompts([6], 128, seed)
    torch.testing.assert_close(greedy(compiled, inputs, 25, assistant_model=helper), expected[0])
    with torch.compiler.set_stance("fail_on_recompile"):
        inputs = mixed_prompts([3], 128, seed)
        torch.testing.assert_close(greedy(compiled, inputs, 25, assistant_model=helper), expected[1])
    assert helper.compiled.stats().generate_calls.keys() == {"fast loop"}
    assert helper.compiled.stats().recompiles == compiled.compiled.stats().recompiles == 0
    gc.collect()
    for own in (compiled, helper):
        assert_account_is_empty(own)


# ---- drafts of the text that the fast loop leaves to HuggingFace: its own loop runs, or says what is wrong


def wrapped_with(**options: Any) -> PreTrainedModel:
    return compiled_llm.wrap(tiny_qwen3(eos_token_id=None), **{**OPTIONS, "mode": "eager", **options})


@pytest.mark.parametrize(
    "more", [{"output_scores": True, "return_dict_in_generate": True}, {"typical_p": 0.9, "do_sample": True}]
)
def test_what_steps_with_drafts_cannot_do_is_huggingfaces_loop(more: dict[str, Any], seed: int) -> None:
    model, inputs = wrapped_with(), repeating([6], seed)
    model.generate(**inputs, **{"max_new_tokens": 12, "do_sample": False, "prompt_lookup_num_tokens": 3, **more})
    assert model.compiled.stats().generate_calls == {"compiled forward": 1}


@pytest.mark.drawn(most=1)
@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize("options", [{}, {"batch_invariant": True, "mode": "compile"}], ids=["planned", "invariant"])
def test_planned_steps_and_batch_invariant_ones_leave_drafts_to_huggingface(
    options: dict[str, Any], plain: Any, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not options:
        monkeypatch.setattr(Reference, "decode_ops", lambda self, device: None)
    model, inputs = wrapped_with(**options), repeating([6], seed)
    torch.testing.assert_close(greedy(model, inputs, 12, prompt_lookup_num_tokens=3), greedy(plain, inputs, 12))
    assert model.compiled.stats().generate_calls == {"compiled forward": 1}


def test_a_number_that_is_impossible_is_huggingfaces_error(seed: int) -> None:
    model, inputs = wrapped_with(), repeating([6], seed)
    with pytest.raises(ValueError, match="num_output_tokens"):
        greedy(model, inputs, 5, prompt_lookup_num_tokens=0)
    assert_account_is_empty(model)
