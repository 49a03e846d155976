"""How a request is sampled that does not say: as the model's generation config has it, or by the most likely token."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import GenerationConfig

from compiled_llm.requests.default_sampling import default_sampling, with_defaults

QWEN = GenerationConfig(do_sample=True, temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.05)
OF_QWEN = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05}


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (None, {"temperature": 0.0}),
        (GenerationConfig(), {"temperature": 0.0}),
        (GenerationConfig(do_sample=False, temperature=0.7, top_p=0.8), {"temperature": 0.0}),
        (GenerationConfig(repetition_penalty=1.1), {"temperature": 0.0, "repetition_penalty": 1.1}),
        (GenerationConfig(do_sample=True), {}),
        (GenerationConfig(do_sample=True, min_p=0.1), {"min_p": 0.1}),
        (QWEN, OF_QWEN),
    ],
)
def test_the_generation_config_says_how_tokens_are_drawn(config: Any, found: dict[str, float]) -> None:
    assert default_sampling(config) == found


def test_an_impossible_generation_config_is_named() -> None:
    config = GenerationConfig(do_sample=True)
    config.top_p = 3.0
    with pytest.raises(ValueError, match=r"the model's generation config: SamplingParams: top_p=3\.0"):
        default_sampling(config)


@pytest.mark.parametrize(
    ("given", "defaults", "found"),
    [
        ({"max_tokens": 3}, OF_QWEN, {**OF_QWEN, "max_tokens": 3}),
        ({"temperature": 0.0}, OF_QWEN, {**OF_QWEN, "temperature": 0.0}),
        ({"top_p": 0.5}, OF_QWEN, {**OF_QWEN, "top_p": 0.5}),
        ({"n": 2}, OF_QWEN, {**OF_QWEN, "n": 2}),
        ({"n": 1}, {"temperature": 0.0}, {"temperature": 0.0, "n": 1}),
        ({"n": 2}, {"temperature": 0.0}, {"n": 2}),
        ({"seed": 1}, {"temperature": 0.0}, {"seed": 1}),
        ({"top_k": 5}, {"temperature": 0.0, "repetition_penalty": 1.1}, {"repetition_penalty": 1.1, "top_k": 5}),
        ({"repetition_penalty": 1.3}, {"temperature": 0.0}, {"temperature": 0.0, "repetition_penalty": 1.3}),
        ({}, {}, {}),
    ],
)
def test_a_request_says_what_differs(given: Any, defaults: Any, found: dict[str, float]) -> None:
    assert with_defaults(given, defaults) == found
