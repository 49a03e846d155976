"""Windows are told from all that looks like them somewhere, by asking HuggingFace's own mask functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import masking_utils

from compiled_llm.model.probes.mask_pattern import PatternError, window_of

POSITIONS = 24
CAUSAL = masking_utils.causal_mask_function


def sliding(window: int) -> Callable[..., Any]:
    return masking_utils.sliding_window_causal_mask_function(window)


def chunked(size: int) -> Callable[..., Any]:
    return masking_utils.chunked_causal_mask_function(size, torch.zeros(1, dtype=torch.long))


def and_also(function: Callable[..., Any]) -> Callable[..., Any]:
    return masking_utils.and_masks(CAUSAL, function)


@pytest.mark.parametrize("positions", [1, 2, 3, POSITIONS])
def test_a_window_is_found_whatever_its_size(positions):
    assert window_of(CAUSAL, positions) is None
    for window in range(1, POSITIONS + 3):
        assert window_of(sliding(window), positions) == (window if window < positions else None)


def test_chunks_are_told_from_windows_whatever_their_size():
    for size in range(2, POSITIONS):
        with pytest.raises(PatternError):
            window_of(chunked(size), POSITIONS)
    assert window_of(chunked(1), POSITIONS) == 1
    assert window_of(chunked(POSITIONS), POSITIONS) is None
    with pytest.raises(PatternError):
        window_of(chunked(POSITIONS), POSITIONS + 1)


@pytest.mark.parametrize(
    "function",
    [
        masking_utils.bidirectional_mask_function,
        sliding(0),
        masking_utils.or_masks(CAUSAL, lambda b, h, q, k: (q < 3) & (k < 3)),
        masking_utils.or_masks(sliding(8), lambda b, h, q, k: k < 1),
        and_also(lambda b, h, q, k: (q - k) % 2 == 0),
        and_also(lambda b, h, q, k: k != POSITIONS - 1),
        and_also(lambda b, h, q, k: (q < POSITIONS // 2) | (k > q - 9)),
        and_also(lambda b, h, q, k: (q >= POSITIONS // 2) | (k > q - 9)),
    ],
    ids=["both ways", "nothing", "a prefix both ways", "a sink", "every other", "not the last", "late", "early"],
)
def test_other_patterns_are_none_of_ours(function):
    with pytest.raises(PatternError, match="the query at"):
        window_of(function, POSITIONS)
