"""Prompts of recurrent models that HuggingFace's forward computes: its states go on in our entries, and back again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache

from support.huggingface.cache_name import CACHE
from support.huggingface.recurrent_families import ALL_RECURRENT, RECURRENT
from support.huggingface.recurrent_pairs import HYBRIDS, PAD, plain_family, prompts_of, wrapped_family
from support.parity import assert_account_is_empty, greedy, next_turn

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("one_thread")]

CACHES: dict[str, Callable[[PreTrainedModel], Cache]] = {
    "dynamic": lambda model: DynamicCache(config=model.config),
    "static": lambda model: StaticCache(config=model.config, max_cache_len=64),
}
NEVER: dict[str, Any] = {"eos_token_id": None, "pad_token_id": PAD}


def right_padded(lengths: list[int], seed: int) -> dict[str, Tensor]:
    rows = prompts_of(lengths, seed)
    width = max(lengths)
    ids = torch.tensor([row + [PAD] * (width - len(row)) for row in rows])
    return {"input_ids": ids, "attention_mask": torch.tensor([[1] * len(r) + [0] * (width - len(r)) for r in rows])}


def same_lengths(seed: int) -> dict[str, Tensor]:
    ids = torch.tensor(prompts_of([9, 9], seed))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.drawn(most=2)
@pytest.mark.parametrize("family", RECURRENT)
def test_prompts_padded_on_the_right_go_on_from_huggingfaces_states(family: str, seed: int) -> None:
    model, plain, inputs = wrapped_family(family), plain_family(family), right_padded([3, 14, 9], seed)
    expected = greedy(plain, inputs, 12, **NEVER)
    for _ in range(2):
        torch.testing.assert_close(greedy(model, inputs, 12, **NEVER), expected)
    assert dict(model.compiled.stats().generate_calls) == {"fast loop": 2}
    assert model.compiled.stats().slow_paths == {"prefill": 2}
    assert_account_is_empty(model)


@pytest.mark.drawn(most=2)
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("family", [family for family in HYBRIDS if family != "Jamba"])
def test_a_cache_of_huggingfaces_is_read_and_gets_the_states_back(family: str, kind: str, seed: int) -> None:
    """Two turns of ours over it, and a third one of HuggingFace's own; Jamba's forgets states before several tokens."""
    model, plain, inputs = wrapped_family(family), plain_family(family), same_lengths(seed)
    words = torch.tensor(prompts_of([3, 3], seed + 1))

    def turns(own: PreTrainedModel) -> tuple[Cache, list[Tensor]]:
        cache = CACHES[kind](own)
        first = greedy(own, inputs, 6, return_dict_in_generate=True, **{CACHE: cache}, **NEVER)
        given = next_turn(inputs, first, words)
        second = greedy(own, given, 5, return_dict_in_generate=True, **NEVER)
        third = greedy(plain, next_turn(given, second, words), 5, **NEVER)
        return cache, [first.sequences, second.sequences, third]

    (theirs, expected), (ours, answers) = turns(plain), turns(model)
    torch.testing.assert_close(answers, expected)
    for own, kept in zip(ours.layers, theirs.layers, strict=True):
        for name in ("conv_states", "recurrent_states"):
            torch.testing.assert_close(getattr(own, name, None), getattr(kept, name, None), rtol=1e-3, atol=1e-3)
    assert dict(model.compiled.stats().generate_calls) == {"fast loop": 2}
    assert_account_is_empty(model)


def test_jambas_several_new_tokens_go_on_from_its_states(seed: int) -> None:
    """HuggingFace's own forward forgets the states then: its logits over a cache are not those of the whole text."""
    model, plain, inputs = wrapped_family("Jamba"), plain_family("Jamba"), same_lengths(seed)
    words = torch.tensor(prompts_of([3, 3], seed + 1))
    first = greedy(model, inputs, 6, return_dict_in_generate=True, **{CACHE: CACHES["dynamic"](model)}, **NEVER)
    given = next_turn(inputs, first, words)
    whole = {name: given[name] for name in inputs}
    expected = greedy(plain, whole, 9, **NEVER)
    torch.testing.assert_close(greedy(model, given, 9, **NEVER), expected)


@pytest.mark.parametrize("family", sorted(ALL_RECURRENT))
def test_a_users_cache_that_counts_no_columns_stays_huggingfaces(family: str, seed: int) -> None:
    model, plain, inputs = wrapped_family(family), plain_family(family), same_lengths(seed)
    given = [{**inputs, "cache_params": DynamicCache(config=plain.config)} for _ in range(2)]
    torch.testing.assert_close(greedy(model, given[0], 8, **NEVER), greedy(plain, given[1], 8, **NEVER))
    assert dict(model.compiled.stats().generate_calls) == {"original": 1}
