"""In bfloat16, each token is the one that HuggingFace's processors choose, but for near ties; on a GPU captured."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import compiled_llm
from support.execution.twins import DEVICE, in_float32, on_device
from support.huggingface.followed import ENDS, NEW_TOKENS, SETTINGS, assert_chosen_by_huggingfaces_processors, judged
from support.parity import greedy, mixed_prompts
from support.tiny_models import tiny_qwen3

OPTIONS: dict[str, Any] = {"page_size": 16, "max_batch_size": 8, "progress": False}

Three = tuple[PreTrainedModel, PreTrainedModel, PreTrainedModel]
"""HuggingFace's in float32 and in bfloat16, and a wrapped one."""


def noisy() -> PreTrainedModel:
    return tiny_qwen3(head_dim=64, hidden_size=256, eos_token_id=None).to(torch.bfloat16)


@pytest.fixture(scope="module")
def three() -> Three:
    plain = noisy()
    return copy.deepcopy(plain).float(), plain, compiled_llm.wrap(copy.deepcopy(plain), mode="eager", **OPTIONS)


@pytest.fixture(scope="module")
def three_on_gpu() -> Iterator[Three]:
    plain = noisy().to(DEVICE)
    wrapped = compiled_llm.wrap(copy.deepcopy(plain), **OPTIONS)
    yield in_float32(plain), plain, wrapped
    compiled_llm.unwrap(wrapped)
    gc.collect()


def assert_chosen(three: Three, inputs: dict[str, torch.Tensor], name: str) -> None:
    exact, theirs, wrapped = three
    options = {"eos_token_id": ENDS, "pad_token_id": 0, **SETTINGS[name]}
    text = greedy(wrapped, inputs, NEW_TOKENS, **options)
    assert_chosen_by_huggingfaces_processors(judged(text, exact, theirs, inputs, **SETTINGS[name]))
    assert wrapped.compiled.stats().generate_calls.keys() == {"fast loop"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if "s_t" in n else pytest.mark.whole) for n in SETTINGS])
def test_tokens_are_chosen_by_huggingfaces_processors(name: str, three: Three, seed: int) -> None:
    assert_chosen(three, mixed_prompts([40, 90, 60], 128, seed), name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("repeat", range(3))
def test_on_a_gpu_as_well(name: str, repeat: int, three_on_gpu: Three, seed: int) -> None:
    assert_chosen(three_on_gpu, on_device(mixed_prompts([40, 90, 60], 128, seed + repeat)), name)
    assert three_on_gpu[2].compiled.stats().recompiles == 0


def test_tokens_that_are_not_are_noticed(three: Three, seed: int) -> None:
    exact, theirs, wrapped = three
    inputs = mixed_prompts([40, 90, 60], 128, seed)
    text = greedy(wrapped, inputs, NEW_TOKENS, eos_token_id=ENDS, pad_token_id=0)
    assert judged(text, exact, theirs, inputs).widest <= 1
    for name in ("suppress_tokens", "repetition_penalty", "begin_suppress_tokens"):
        assert judged(text, exact, theirs, inputs, **SETTINGS[name]).widest > 1, name
