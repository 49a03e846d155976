"""Sizes that change from call to call are symbols of their own, whatever they are when a program is compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import compiled_llm
from support.parity import greedy, mixed_prompts
from support.tiny_models import tiny_qwen3

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("one_thread", "without_inductor")]

PAGE_SIZE = 16
OPTIONS: dict[str, Any] = {"page_size": PAGE_SIZE, "max_batch_size": 4, "progress": False}


@pytest.mark.whole
@pytest.mark.parametrize("pages", [2, 3, 4, 5, 6])
def test_there_may_be_as_many_pages_as_rows_or_tokens(pages, seed):
    """Prefill is compiled with 3 rows, 4 starts, 6 tokens, 5 logits and 4 choices, decode with 2 rows and 3 starts."""
    memory = f"{PAGE_SIZE * (pages - 1)} tokens"
    reference, plain = (tiny_qwen3(eos_token_id=None, num_hidden_layers=1) for _ in range(2))
    model = compiled_llm.wrap(plain, kv_memory=memory, **OPTIONS)
    assert model.compiled.model_runner().state.pages[0].shape[0] == pages
    model.compiled.warmup([2, 4, 1])
    for lengths in ([3], [5, 2], [3, 4, 5], [2, 3, 4, 5])[: pages - 1]:
        inputs = mixed_prompts(lengths, 128, seed)
        torch.testing.assert_close(greedy(model, inputs, 3), greedy(reference, inputs, 3))
    assert set(model.compiled.graphs.values()) == {1}
    assert model.compiled.stats().recompiles == 0
