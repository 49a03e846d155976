"""Pages of fp8 under an engine's requests; with other options: `tests/engine/options`."""

from __future__ import annotations

import pytest
import torch

from compiled_llm import Engine, kv_scales
from support.engine.invariant_answers import answers_of, check_answers, invariant, some_requests
from support.parity import assert_account_is_empty
from support.tiny_models import tiny_qwen3


@pytest.mark.usefixtures("one_thread", "without_inductor")
def test_log_probabilities_have_the_bits_of_the_model_alone(seed: int) -> None:
    """With `batch_invariant`, whose pages are rounded whether a prefill or a decode step writes them."""
    config = {"num_hidden_layers": 1, "eos_token_id": None, "head_dim": 32}
    scales, asked = kv_scales(tiny_qwen3(**config), [[*range(3, 60)]]), some_requests(seed, 6)
    model = invariant(tiny_qwen3(**config), kv_dtype="fp8_e4m3", kv_scales=scales)
    with Engine(model, max_num_seqs=6) as engine:
        outputs = answers_of(engine, asked, seed)
        assert engine.stats().cached_tokens > 0
    assert check_answers(model, asked, outputs) > 50
    assert model.compiled.model_runner().state.pages[0].dtype == torch.float8_e4m3fn
    assert_account_is_empty(model)
