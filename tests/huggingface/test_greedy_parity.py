"""Greedy tokens equal HuggingFace's, token for token, and every graph is compiled exactly once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from transformers import PreTrainedModel

import compiled_llm
from support.parity import assert_account_is_empty, greedy, mixed_prompts
from support.tiny_models import tiny_llama, tiny_qwen3

# Below, at and above buckets (1, 2, 4, 8), one after the other on the same model, and how many tokens each writes.
BATCHES = [
    ([7], 80), ([5, 9], 20), ([1, 12, 30], 20), ([4, 4, 4, 4], 20),
    ([3, 17, 1, 8, 25], 40), ([6], 20), ([2, 31, 9], 20),
]  # fmt: skip


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3": partial(tiny_qwen3, seed=1, num_hidden_layers=1),
    "qwen3 of two layers": partial(tiny_qwen3, seed=1),
    "llama": partial(tiny_llama, seed=1),
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(n, marks=pytest.mark.core if n == "qwen3" else pytest.mark.whole) for n in MODELS],
)
def models(request: pytest.FixtureRequest) -> Iterator[tuple[PreTrainedModel, PreTrainedModel]]:
    """A model and a wrapped twin of it, compiled once for all tests of this file; Inductor takes its time by layer."""
    plain, twin = (MODELS[request.param]() for _ in range(2))
    wrapped = compiled_llm.wrap(twin, page_size=4, max_batch_size=8, progress=False)
    yield plain, wrapped
    compiled_llm.unwrap(wrapped)


def test_tokens_equal_huggingface_for_mixed_lengths_and_repeated_calls(models, seed):
    plain, wrapped = models
    for number, (lengths, new_tokens) in enumerate(BATCHES):
        inputs = mixed_prompts(lengths, 128, seed + number)
        expected = greedy(plain, inputs, new_tokens, eos_token_id=None)
        assert expected.shape[1] == max(lengths) + new_tokens
        for again in (new_tokens, 20):
            tokens = greedy(wrapped, inputs, again, eos_token_id=None)
            torch.testing.assert_close(tokens, expected[:, : max(lengths) + again])
        assert_account_is_empty(wrapped)


def test_three_graphs_serve_all_batches_and_nothing_recompiles(models, seed):
    _, wrapped = models
    wrapped.compiled.warmup([1, 2, 3, 8])
    assert wrapped.compiled.graphs == {"prefill": 1, "decode, batch 1": 1, "decode, larger batches": 1}
    with torch.compiler.set_stance("fail_on_recompile"):
        for number, lengths in enumerate([[1], [9], [1, 1], [6, 2], [1] * 7, [5] * 8]):
            greedy(wrapped, mixed_prompts(lengths, 128, seed + number), 9, eos_token_id=None)
    stats = wrapped.compiled.stats()
    assert (stats.graphs, stats.graph_breaks, stats.recompiles, stats.cudagraph_skips) == (3, 0, 0, 0)


@pytest.fixture
def all_cores() -> Iterator[None]:
    """tox gives tests one thread; here products and loops are divided among several."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(2, os.cpu_count() or 1))
    yield
    torch.set_num_threads(before)


@pytest.mark.whole
@pytest.mark.slow
@pytest.mark.usefixtures("all_cores")
@pytest.mark.parametrize(("layers", "tokens"), [(2, 20), pytest.param(None, 200, marks=pytest.mark.whole)])
def test_real_weights(layers, tokens, demo_model_dir, seed, request):
    """Of its first layers, unless asked for the whole, and then through Inductor, which takes minutes."""
    from compiled_llm.commands.loading.load import load

    if layers is not None:
        request.getfixturevalue("without_inductor")
    model, tokenizer = load("demo", torch.float32, "cpu")
    model.model.layers = model.model.layers[:layers]
    model.config.num_hidden_layers = len(model.model.layers)
    texts = ["The capital of France is", "Once upon a time, in a village by the sea, there lived", "2 + 2 ="]
    inputs = dict(tokenizer(texts, return_tensors="pt", padding=True, padding_side="left"))
    expected = greedy(model, inputs, tokens)
    compiled_llm.wrap(model, progress=False)
    torch.testing.assert_close(greedy(model, inputs, tokens), expected)
    torch.testing.assert_close(greedy(model, inputs, 10), expected[:, : inputs["input_ids"].shape[1] + 10])
    stats = model.compiled.stats()
    assert (stats.graph_breaks, stats.recompiles) == (0, 0)
    assert_account_is_empty(model)
