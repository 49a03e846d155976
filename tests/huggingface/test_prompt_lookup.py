"""``generate(prompt_lookup_num_tokens=...)`` in the fast loop gives what ``generate`` gives, for any number of rows."""

from __future__ import annotations

import gc
import logging
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

import compiled_llm
from compiled_llm.execution.drafts import texts
from compiled_llm.execution.generate_loop import GenerateLoop
from support.execution.stand_in_cuda_graphs import let_a_cpu_capture
from support.huggingface.repeating import repeating
from support.parity import FEW_PAGES, assert_account_is_empty, greedy, next_turn
from support.tiny_models import tiny_qwen3

LENGTHS = [[7], [5, 9], [3, 8, 4], [6, 2, 9, 5, 7, 3, 8, 4]]


@pytest.fixture(scope="module")
def plain() -> PreTrainedModel:
    return tiny_qwen3(eos_token_id=None)


def wrapped(**options: Any) -> PreTrainedModel:
    return compiled_llm.wrap(tiny_qwen3(eos_token_id=None), **{**FEW_PAGES, "mode": "eager", **options})


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("lengths", LENGTHS, ids=map(len, LENGTHS))
@pytest.mark.parametrize("asynchronous", [False, True])
def test_greedy_tokens_are_those_of_generate(
    lengths: list[int], asynchronous: bool, plain: Any, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if asynchronous:
        let_a_cpu_capture(monkeypatch)
        monkeypatch.setattr(GenerateLoop, "asynchronous", True)
    model, inputs = wrapped(), repeating(lengths, seed)
    for _ in range(2):
        torch.testing.assert_close(greedy(model, inputs, 30, prompt_lookup_num_tokens=5), greedy(plain, inputs, 30))
    assert model.compiled.stats().generate_calls == {"fast loop": 2}
    assert_account_is_empty(model)


SETTINGS: dict[str, dict[str, Any]] = {
    "top_p": {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 0},
    "top_k": {"do_sample": True, "temperature": 1.5, "top_k": 9},
    "min_p": {"do_sample": True, "min_p": 0.05},
    "penalty": {"repetition_penalty": 1.4},
    "bias": {"sequence_bias": [[[5], 3.0], [[6, 7], 20.0]]},
    "bad words": {"bad_words_ids": [[9], [4, 5], [6, 6, 6]]},
    "minimum": {"min_new_tokens": 20, "eos_token_id": [5, 6, 7, 8]},
    "ends": {"eos_token_id": list(range(3, 20)), "pad_token_id": 0},
}


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("lengths", [[7], [5, 9, 4]], ids=[1, 3])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_seed_gives_the_tokens_that_it_gives_without_drafts(name: str, lengths: list[int], seed: int) -> None:
    """Whatever the settings are, those that look back at tokens included."""
    model, inputs = wrapped(), repeating(lengths, seed)
    options = {"max_new_tokens": 30, "do_sample": False, **SETTINGS[name]}
    results = []
    for more in ({}, {"prompt_lookup_num_tokens": 7}, {"prompt_lookup_num_tokens": 2, "max_matching_ngram_size": 1}):
        torch.manual_seed(seed)
        results.append(model.generate(**inputs, **options, **more))
        torch.testing.assert_close(results[0], results[-1])
    assert model.compiled.stats().generate_calls == {"fast loop": 3}
    assert_account_is_empty(model)


class Noting(BaseStreamer):
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.given: list[list[int]] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.given.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended = True


def test_a_streamer_and_criteria_see_each_token_as_without_drafts(plain: Any, seed: int) -> None:
    model, inputs = wrapped(), repeating([6], seed)
    seen: dict[int, tuple[list[list[int]], list[int]]] = {}
    for number in (None, 6):
        streamer, lengths = Noting(), []

        def note(ids: Tensor, scores: Any, lengths: list[int] = lengths) -> Tensor:
            lengths.append(ids.shape[1])
            return torch.full((len(ids),), ids.shape[1] >= 30)

        more = {"streamer": streamer, "stopping_criteria": [note]}
        greedy(model, inputs, 40, prompt_lookup_num_tokens=number, **more)
        seen[number or 0] = streamer.given, lengths
        assert streamer.ended
    assert seen[0] == seen[6]
    assert model.compiled.stats().generate_calls == {"fast loop": 2}
    assert seen[6][1] == list(range(13, 31))
    assert_account_is_empty(model)


@pytest.mark.whole
@pytest.mark.parametrize("lengths", [[6], [5, 8, 3]], ids=[1, 3])
def test_a_kept_cache_is_huggingfaces_and_goes_on(lengths: list[int], plain: Any, seed: int) -> None:
    """Rows of other lengths, some of which end early: pads are stored after them."""
    model, words = wrapped(), torch.full((len(lengths), 3), 7)
    ends = greedy(plain, repeating(lengths, seed), 20)[:, -12]
    options = {"return_dict_in_generate": True, "eos_token_id": ends.tolist(), "pad_token_id": 0}
    given = [repeating(lengths, seed)] * 2
    for turn in range(3):
        lookup = {"prompt_lookup_num_tokens": 5} if turn != 1 else {}
        theirs = greedy(plain, given[0], 20 - turn, **options)
        ours = greedy(model, given[1], 20 - turn, **options, **lookup)
        torch.testing.assert_close(ours.sequences, theirs.sequences)
        for (keys, values, _), (their_keys, their_values, *_) in zip(
            ours.past_key_values, theirs.past_key_values, strict=True
        ):
            stored = keys.any(dim=-1) | ~their_keys.any(dim=-1)
            assert stored.float().mean() > 0.8
            torch.testing.assert_close(keys[stored], their_keys[stored], rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(values[stored], their_values[stored], rtol=1e-3, atol=1e-4)
        given = [next_turn(given[0], own, words) for own in (theirs, ours)]
    assert model.compiled.stats().generate_calls == {"fast loop": 3}


def test_a_kept_cache_that_nobody_holds_gives_its_pages_back_at_once(seed: int) -> None:
    """Not only once Python looks for cycles: the pages may run out before."""
    model, inputs = wrapped(), repeating([6, 9], seed)
    gc.disable()
    try:
        greedy(model, inputs, 20, prompt_lookup_num_tokens=5, return_dict_in_generate=True)
        assert_account_is_empty(model)
    finally:
        gc.enable()


def test_a_longest_match_beyond_any_text_is_the_whole_text(plain: Any, seed: int) -> None:
    model, inputs = wrapped(), repeating([6, 9], seed)
    expected = greedy(plain, inputs, 12)
    ours = greedy(model, inputs, 12, prompt_lookup_num_tokens=4, max_matching_ngram_size=2**40)
    torch.testing.assert_close(ours, expected)
    assert model.compiled.stats().generate_calls == {"fast loop": 1}


def test_embeddings_are_not_searched_and_their_answers_are(plain: Any, seed: int) -> None:
    model, inputs = wrapped(), repeating([6, 9], seed)
    embeddings = plain.get_input_embeddings()(inputs.pop("input_ids")).detach()
    options = {"inputs_embeds": embeddings, **inputs}
    torch.testing.assert_close(greedy(model, options, 25, prompt_lookup_num_tokens=4), greedy(plain, options, 25))


@pytest.mark.parametrize("free", [10, 10_000])
def test_too_little_memory_for_texts_is_huggingfaces_loop(
    free: int, plain: Any, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = wrapped(), repeating([6], seed)
    greedy(model, inputs, 2)
    monkeypatch.setattr(texts, "free_bytes", lambda device: free * 1000)
    torch.testing.assert_close(greedy(model, inputs, 12, prompt_lookup_num_tokens=3), greedy(plain, inputs, 12))
    assert ("compiled forward" in model.compiled.stats().generate_calls) is (free == 10)


def test_more_than_seven_are_cut_to_seven_which_is_said_once(
    plain: Any, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    model, inputs = wrapped(), repeating([6], seed)
    with caplog.at_level(logging.WARNING, "compiled_llm"):
        for _ in range(2):
            torch.testing.assert_close(
                greedy(model, inputs, 20, prompt_lookup_num_tokens=12), greedy(plain, inputs, 20)
            )
    assert len([record for record in caplog.records if "prompt_lookup_num_tokens=12" in record.getMessage()]) == 1
