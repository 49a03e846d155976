"""In training mode a wrapped model computes HuggingFace's tokens by the programs that it has, and no flag moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import compiled_llm
from support.huggingface.cache_name import CACHE
from support.huggingface.pairs import OPTIONS
from support.parity import greedy, mixed_prompts
from support.tiny_models import tiny_qwen3

pytestmark = pytest.mark.core


@pytest.fixture
def inputs(seed: int) -> dict[str, Any]:
    return mixed_prompts([3, 5], 128, seed)


def flags(model: Any) -> list[bool]:
    return [module.training for module in model.modules()]


@pytest.mark.whole
@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize(
    "begins",
    [
        pytest.param(True, id="traced in training mode"),
        pytest.param(False, id="traced in evaluation mode", marks=pytest.mark.whole),
    ],
)
def test_flips_of_training_and_of_checkpointing_compile_nothing(inputs, begins):
    plain = tiny_qwen3(eos_token_id=None)
    model = compiled_llm.wrap(
        tiny_qwen3(eos_token_id=None).train(begins), **{**OPTIONS, "mode": "compile", "progress": False}
    )
    expected = greedy(plain, inputs, 5)
    torch.testing.assert_close(greedy(model, inputs, 5), expected)
    graphs = model.compiled.stats().graphs
    version = model.compiled.facts.version.layers
    for trains in (not begins, begins):
        model.train(trains)
        before = flags(model)
        torch.testing.assert_close(greedy(model, inputs, 5), expected)
        assert flags(model) == before
    for trains in (True, False):  # as trainers do around their rollouts
        model.gradient_checkpointing_enable()
        model.disable_input_require_grads()
        if trains:
            model.gradient_checkpointing_disable()
        model.train(trains)
        torch.testing.assert_close(greedy(model, inputs, 5), expected)
    model.compiled.facts.version.begin_check()
    stats = model.compiled.stats()
    assert (stats.graphs, stats.recompiles, stats.generate_calls) == (graphs, 0, {"fast loop": 5})
    assert model.compiled.facts.version.layers == version
    model.model.layers[0].self_attn.scaling *= 2  # other attributes are guarded as before
    model.compiled.facts.version.begin_check()
    assert model.compiled.facts.version.layers != version


def test_checkpointed_layers_have_huggingfaces_tokens(inputs):
    """Before transformers 5.24 they use no cache, and their tokens are others."""
    plain, model = tiny_qwen3(eos_token_id=None), tiny_qwen3(eos_token_id=None)
    compiled_llm.wrap(model, **OPTIONS)
    expected = greedy(plain, inputs, 5)
    for each in (plain, model):
        each.train()
        each.gradient_checkpointing_enable()
        each.disable_input_require_grads()
    theirs, ours = greedy(plain, inputs, 5), greedy(model, inputs, 5)
    torch.testing.assert_close(ours, theirs)
    assert torch.equal(ours, expected) == (CACHE == "cache")
    assert model.compiled.stats().slow_paths == {"gradient_checkpointing": 1}
    with compiled_llm.Engine(model) as engine, pytest.raises(RuntimeError, match=r"gradient_checkpointing_disable\(\)"):
        engine.submit([5, 6])
    model.gradient_checkpointing_disable()
    torch.testing.assert_close(greedy(model, inputs, 5), expected)


def test_a_model_that_checkpoints_in_training_mode_is_wrapped_later():
    model = tiny_qwen3().train()
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match=r"gradient_checkpointing=True\).*gradient_checkpointing_disable\(\)"):
        compiled_llm.wrap(model, **OPTIONS)
