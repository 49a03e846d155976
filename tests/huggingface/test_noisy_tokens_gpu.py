"""On a GPU, captured and in bfloat16, each token is the one that HuggingFace's processors choose, but for near ties."""

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

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def three() -> Iterator[tuple[PreTrainedModel, PreTrainedModel, PreTrainedModel]]:
    """HuggingFace's in float32 and in bfloat16, and a wrapped one."""
    plain = tiny_qwen3(head_dim=64, hidden_size=256, eos_token_id=None).to(DEVICE, torch.bfloat16)
    wrapped = compiled_llm.wrap(copy.deepcopy(plain), page_size=16, max_batch_size=8, progress=False)
    yield in_float32(plain), plain, wrapped
    compiled_llm.unwrap(wrapped)
    gc.collect()


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("repeat", range(3))
def test_tokens_are_chosen_by_huggingfaces_processors(name: str, repeat: int, three: Any, seed: int) -> None:
    exact, theirs, wrapped = three
    inputs = on_device(mixed_prompts([40, 90, 60], 128, seed + repeat))
    options = {"eos_token_id": ENDS, "pad_token_id": 0, **SETTINGS[name]}
    text = greedy(wrapped, inputs, NEW_TOKENS, **options)
    assert_chosen_by_huggingfaces_processors(judged(text, exact, theirs, inputs, **SETTINGS[name]))
    assert wrapped.compiled.stats().generate_calls.keys() == {"fast loop"}
    assert wrapped.compiled.stats().recompiles == 0
