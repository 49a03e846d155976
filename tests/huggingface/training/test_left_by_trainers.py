"""What trainers leave on a model does not slow it down if it does nothing to tokens, and is named if it does."""

from __future__ import annotations

import functools
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn

import compiled_llm
from compiled_llm.model import layer_probe
from support.huggingface.pairs import OPTIONS
from support.noting import note_calls
from support.parity import greedy, mixed_prompts
from support.tiny_models import tiny_qwen3

pytestmark = pytest.mark.core


@pytest.fixture
def inputs(seed: int) -> dict[str, Any]:
    return mixed_prompts([3, 5], 128, seed)


def pair(**options: Any) -> tuple[Any, Any]:
    model = compiled_llm.wrap(tiny_qwen3(eos_token_id=None), **{**OPTIONS, "progress": False, **options})
    return tiny_qwen3(eos_token_id=None), model


@pytest.mark.whole
@pytest.mark.usefixtures("without_inductor")
def test_hooks_that_ask_for_gradients_come_and_go_without_a_compile(inputs):
    plain, model = pair(mode="compile")
    expected = greedy(plain, inputs, 5)
    torch.testing.assert_close(greedy(model, inputs, 5), expected)
    graphs = model.compiled.stats().graphs
    for _ in range(2):  # each leaves one
        model.gradient_checkpointing_enable()
        model.gradient_checkpointing_disable()
        torch.testing.assert_close(greedy(model, inputs, 5), expected)
    hooks = list(model.model.embed_tokens._forward_hooks)
    assert len(hooks) > 1
    ids = inputs["input_ids"]
    assert model.model.embed_tokens(ids).requires_grad  # they stay the user's
    model.disable_input_require_grads()
    torch.testing.assert_close(greedy(model, inputs, 5), expected)
    stats = model.compiled.stats()
    assert (stats.graphs, stats.recompiles, stats.generate_calls) == (graphs, 0, {"fast loop": 4})
    assert stats.passed_over == {"model.embed_tokens: hooks that ask for gradients": 3}
    assert "passed over" in str(stats)
    assert [*model.model.embed_tokens._forward_hooks] == hooks[:-1]


def test_marks_of_a_training_step_are_no_change_of_the_model(inputs, monkeypatch):
    plain, model = pair(mode="eager")
    expected = greedy(plain, inputs, 5)
    torch.testing.assert_close(greedy(model, inputs, 5), expected)
    trials = note_calls(monkeypatch, layer_probe, "trial_forward", lambda *asked, **inputs: asked)
    version = model.compiled.model_runner().graph_manager._version
    before = version.values, version.probed
    for _ in range(2):
        model.gradient_checkpointing_enable()  # a list of hooks of its own, each time
        model.train()
        model.gradient_checkpointing_disable()
        model.eval()
        model.add_model_tags("grpo")
        model._is_accelerate_prepared = True
        torch.testing.assert_close(greedy(model, inputs, 5), expected)
        version.begin_check()
        assert (version.values, version.probed) == before
    assert not trials


def test_another_hook_on_an_embedding_takes_the_original_path_and_is_named(inputs):
    plain, model = pair()
    for each in (plain, model):
        each.model.embed_tokens.register_forward_hook(doubled)
    torch.testing.assert_close(greedy(model, inputs, 5), greedy(plain, inputs, 5))
    (reason,) = model.compiled.counters.slow_generates
    assert str(reason) == f"hooks are on inner modules (model.embed_tokens, by doubled of {__name__.partition('.')[0]})"


def doubled(module: nn.Module, args: Any, output: Any) -> Any:
    return output * 2


def test_wrappers_of_mixed_precision_stay_in_effect_and_say_how_to_take_them_off(inputs):
    utils = pytest.importorskip("accelerate.utils")
    plain, model = pair()
    for each in (plain, model):
        each._original_forward = each.forward
        autocast = torch.autocast("cpu", dtype=torch.bfloat16)
        each.forward = MethodType(utils.convert_outputs_to_fp32(autocast(each.forward.__func__)), each)
    torch.testing.assert_close(greedy(model, inputs, 5), greedy(plain, inputs, 5))
    (reason,) = model.compiled.counters.slow_generates
    assert "convert_outputs_to_fp32 of accelerate, which accelerator.unwrap_model" in str(reason)
    for each in (plain, model):
        utils.extract_model_from_parallel(each, keep_fp32_wrapper=False)
    assert "forward" in vars(model)  # the innermost function of the class's
    torch.testing.assert_close(greedy(model, inputs, 5), greedy(plain, inputs, 5))
    assert model.compiled.stats().generate_calls == {"original": 1, "fast loop": 1}


def test_a_forward_of_another_model_stays_in_effect(inputs):
    plain, model = pair()
    other = tiny_qwen3(seed=1, eos_token_id=None)
    model.forward = functools.wraps(other.forward)(lambda *args, **kwargs: other.forward(*args, **kwargs))
    torch.testing.assert_close(greedy(model, inputs, 5), greedy(other, inputs, 5))
    assert not torch.equal(greedy(model, inputs, 5), greedy(plain, inputs, 5))
    assert model.compiled.stats().slow_paths == {"own_forward": 2}


def test_the_fused_head_of_trl_is_the_reason_for_its_calls_of_the_module_inside(inputs):
    trainer_utils = pytest.importorskip("trl.trainer.utils")
    plain, model = pair()
    for each in (plain, model):
        trainer_utils.add_fused_lm_head(each)
    given = {**inputs, "labels": inputs["input_ids"]}
    with torch.no_grad():
        for call in (model, model.forward):  # PEFT's model calls the latter
            torch.testing.assert_close(call(**given, fused_lm_head=True).loss, plain(**given, fused_lm_head=True).loss)
        model(**inputs)
    stats = model.compiled.stats()
    assert (stats.forward_calls, stats.slow_paths) == ({"outside": 2, "compiled": 1}, {"forward: fused_head": 2})
    (reason,) = model.compiled.counters.slow_forwards
    assert str(reason) == "the module inside was called by itself, as add_fused_lm_head of trl does"
    assert "gradients need HuggingFace's forward" in reason.advice
