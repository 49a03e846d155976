"""Sliding windows count columns, hidden ones too: what pages would count otherwise is HuggingFace's, or refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import compiled_llm
from compiled_llm.huggingface.cache.hidden_columns import VisibilityMismatchError, differing_window
from support.huggingface.families import FAMILIES, make
from support.parity import assert_account_is_empty, greedy, mixed_prompts

OPTIONS: dict[str, Any] = {"mode": "eager", "page_size": 4, "kv_memory": "4000 tokens", "progress": False}


def brute_force(stored: np.ndarray, first: int, growth: int, window: int) -> bool:
    columns = [*np.flatnonzero(stored), *range(len(stored), len(stored) + growth)]
    for index, query in enumerate(columns):
        by_column = [key for key in columns[: index + 1] if key > query - window]
        if query >= first and by_column != columns[max(0, index + 1 - window) : index + 1]:
            return True
    return False


def test_windows_that_see_something_else_are_those_that_a_plain_count_finds(seed):
    random = np.random.default_rng(seed)
    seen = []
    for _ in range(2000):
        stored = random.random((2, random.integers(1, 16))) < random.choice([0.5, 0.8, 1.0])
        stored[:, : random.integers(0, 4)] = False
        first, growth = int(random.integers(0, stored.shape[1] + 1)), int(random.integers(0, 6))
        windows = tuple(random.choice(range(1, 12), 2, replace=False).tolist())
        expected = any(brute_force(row, first, growth, window) for row in stored for window in windows)
        assert (differing_window(stored, first, growth, windows) is not None) == expected
        seen.append(expected)
    assert 0.2 < np.mean(seen) < 0.8


@pytest.fixture(scope="module", params=["Mistral", "Gemma2"])
def models(request: pytest.FixtureRequest) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The same model twice, the first one unwrapped; windows of 7 and 8 tokens."""
    plain, wrapped = (make(request.param, FAMILIES[request.param], 0) for _ in range(2))
    return plain, compiled_llm.wrap(wrapped, **OPTIONS)


def holed(holes: list[int], seed: int) -> dict[str, torch.Tensor]:
    inputs = mixed_prompts([20, 14], 128, seed)
    inputs["attention_mask"][0, holes] = 0
    return inputs


@pytest.mark.core
def test_windows_with_hidden_tokens_in_their_midst_are_huggingfaces(models, seed):
    plain, wrapped = models
    inputs = holed([5, 6, 16], seed)
    shown = inputs["attention_mask"].bool()
    for options in ({}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 3}):
        rows = inputs if "num_beams" in options else {name: value[:1] for name, value in inputs.items()}
        torch.testing.assert_close(greedy(wrapped, rows, 12, **options), greedy(plain, rows, 12, **options))
    with torch.no_grad():
        torch.testing.assert_close(wrapped(**inputs).logits[shown], plain(**inputs).logits[shown])
    stats = wrapped.compiled.stats()
    assert stats.generate_calls["original"] == 3
    assert stats.forward_calls["original"] == 1
    assert stats.slow_paths["hidden_in_window"] >= 3
    assert_account_is_empty(wrapped)


@pytest.mark.core
def test_a_chat_whose_first_row_ended_early_goes_on_until_a_window_reaches_the_padding(models, seed):
    plain, wrapped = models
    turn = mixed_prompts([3, 3], 128, seed)
    cache = wrapped.compiled.new_cache()
    text = greedy(wrapped, turn, 2, past_key_values=cache)
    text = torch.cat([text, turn["input_ids"][:, :1]], dim=1)
    mask = torch.ones_like(text)
    mask[0, 4] = 0  # its first answer had one token
    short = {"input_ids": text, "attention_mask": mask}
    torch.testing.assert_close(greedy(wrapped, short, 1, past_key_values=cache), greedy(plain, short, 1))
    length = cache.seen
    with pytest.raises(ValueError, match=r"row 0 has hidden tokens between others, .* windows of [78] tokens"):
        greedy(wrapped, short, 12, past_key_values=cache)
    more = torch.cat([mask, torch.ones_like(text)], dim=1)
    with torch.no_grad(), pytest.raises(VisibilityMismatchError):
        wrapped(text, attention_mask=more, past_key_values=cache)
    assert cache.seen == length
    cache.close()
    torch.testing.assert_close(greedy(wrapped, short, 12), greedy(plain, short, 12))
    assert_account_is_empty(wrapped)
