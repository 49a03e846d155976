"""HuggingFace's processors of tokens and short sequences, in the graph: equal to HuggingFace's own loop."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import compiled_llm
from support.parity import assert_account_is_empty, greedy, mixed_prompts, next_turn
from support.tiny_models import tiny_qwen3

pytestmark = pytest.mark.core

PROCESSING: dict[str, dict[str, Any]] = {
    "sequences": {"bad_words_ids": [[token] * (2 + token % 3) for token in range(100)] + [[5], [60, 61, 62]]},
    "longer biases": {
        "sequence_bias": {(one, one + step): 3.0 - step for one in range(0, 100, 2) for step in range(1, 6)}
    },
    "bias": {"sequence_bias": {(9,): 2.0, (60,): -3.0, (5,): float("-inf")}},
    "repetition": {"repetition_penalty": 1.4},
    "bad words": {"bad_words_ids": [[token] for token in range(20, 64)]},
    "min_length": {"min_length": 14},
    "min_new_tokens": {"min_new_tokens": 12},
    "forced_eos": {"forced_eos_token_id": 127},
    "invalid": {"remove_invalid_values": True},
    "suppress": {"suppress_tokens": list(range(64, 100))},
    "begin": {"begin_suppress_tokens": list(range(100, 128))},
    "normalised": {"renormalize_logits": True},
}
ENDS = list(range(0, 128, 9))
"""Tokens that end rows early, here and there."""


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    return tiny_qwen3(), compiled_llm.wrap(tiny_qwen3(), mode="eager", page_size=4, progress=False)


def assert_equal(pair: tuple[Any, Any], lengths: list[int], seed: int, path: str, **options: Any) -> torch.Tensor:
    plain, wrapped = pair
    inputs = mixed_prompts(lengths, 128, seed)
    before = wrapped.compiled.stats().generate_calls
    ours = greedy(wrapped, inputs, 22, **options)
    torch.testing.assert_close(ours, greedy(plain, inputs, 22, **options), msg=str(options))
    assert wrapped.compiled.stats().generate_calls == before | {path: before.get(path, 0) + 1}
    return ours


def assert_equal_and_fast(pair: tuple[Any, Any], lengths: list[int], seed: int, **options: Any) -> torch.Tensor:
    return assert_equal(pair, lengths, seed, "fast loop", **options)


NAMES = list(PROCESSING)
FEW_PAIRS = [(name, NAMES[number - step]) for step in (1, 5) for number, name in enumerate(NAMES)]
ALL_PAIRS = list(itertools.combinations(NAMES, 2))


@pytest.mark.parametrize("pairs", [FEW_PAIRS, pytest.param(ALL_PAIRS, marks=pytest.mark.whole)], ids=["few", "all"])
def test_pairs_equal_huggingface(pair: Any, pairs: list[tuple[str, str]], seed: int) -> None:
    """Each is in four of the few pairs."""
    for turn, (first, second) in enumerate(pairs):
        both = PROCESSING[first] | PROCESSING[second]
        assert_equal_and_fast(pair, [3, 1 + turn % 5], seed + turn, eos_token_id=ENDS, **both)


def test_all_together_equal_huggingface(pair: Any, seed: int) -> None:
    everything = {name: value for each in PROCESSING.values() for name, value in each.items()}
    for lengths in ([1], [7], [5, 5], [2, 11, 5]):
        assert_equal_and_fast(pair, lengths, seed, eos_token_id=ENDS, **everything)


FORCED = {"forced_eos_token_id": [127, 3]}
BETWEEN_STEPS: dict[str, dict[str, Any]] = {
    "forced ends with a penalty": {**FORCED, "eos_token_id": 2, "repetition_penalty": 1.2},
    "a forced end that is barred": {"forced_eos_token_id": 2, "min_new_tokens": 40, "eos_token_id": 2},
    "a bias as large as float32's": {"sequence_bias": {(9,): 1e15}},
    "normalised after": {"renormalize_logits": True, "no_repeat_ngram_size": 3},
}


@pytest.mark.parametrize("options", BETWEEN_STEPS.values(), ids=BETWEEN_STEPS)
def test_what_only_huggingfaces_order_decides(pair: Any, options: dict[str, Any], seed: int) -> None:
    assert_equal(pair, [2, 9], seed, "processed loop", **{"eos_token_id": ENDS, **options})
    assert_account_is_empty(pair[1])


@pytest.mark.parametrize("names", [(), ("suppress", "bad words"), ("min_new_tokens",)], ids=str)
def test_several_last_tokens_are_forced(pair: Any, names: tuple[str, ...], seed: int) -> None:
    options = {name: value for each in names for name, value in PROCESSING[each].items()}
    output = assert_equal_and_fast(pair, [4, 9], seed, forced_eos_token_id=[127, 3, 127], eos_token_id=[70], **options)
    assert set(output[:, -1].tolist()) <= {0, 3, 70}
    drawn = pair[1].generate(
        **mixed_prompts([4] * 20, 128, seed),
        max_new_tokens=2,
        do_sample=True,
        forced_eos_token_id=[127, 3],
        eos_token_id=None,
    )
    assert set(drawn[:, -1].tolist()) == {3, 127}


def test_a_first_token_is_forced_after_prompts_of_one_token(pair: Any, seed: int) -> None:
    for lengths in ([1, 1], [1, 3]):
        output = assert_equal_and_fast(pair, lengths, seed, forced_bos_token_id=77, eos_token_id=None)
        assert (output[:, max(lengths)] == 77).all() == (max(lengths) == 1)


def test_a_second_token_is_forced_after_embeddings_which_are_no_tokens(pair: Any) -> None:
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "forced_bos_token_id": 77, "eos_token_id": None}
    theirs, ours = (
        model.generate(inputs_embeds=model.get_input_embeddings()(torch.tensor([[5, 9, 4]])), **options)
        for model in pair
    )
    torch.testing.assert_close(ours, theirs)
    assert ours[:, 1].tolist() == [77]


def test_a_conversation_counts_from_its_own_columns(pair: Any, seed: int) -> None:
    """What continues a cache is at other positions than its first answer was."""
    inputs = mixed_prompts([4, 9], 128, seed)
    results = []
    for model in pair:
        first = greedy(model, inputs, 6, return_dict_in_generate=True, eos_token_id=None)
        later = next_turn(inputs, first, torch.zeros(2, 0, dtype=torch.long))
        results.append(greedy(model, later, 9, eos_token_id=ENDS, min_new_tokens=5, begin_suppress_tokens=ENDS[::2]))
    torch.testing.assert_close(*results)
