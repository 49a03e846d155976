"""Methods of classes, and functions, that are replaced after the first call are those of the next one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.qwen3 import modeling_qwen3 as qwen3

import compiled_llm
from support.huggingface.pairs import OPTIONS, pair
from support.parity import greedy, mixed_prompts
from support.tiny_models import tiny_qwen3

pytestmark = pytest.mark.core

Function = Callable[..., Any]


def wrap(mode: str) -> PreTrainedModel:
    model = tiny_qwen3(num_hidden_layers=1, eos_token_id=None)
    return compiled_llm.wrap(model, **{**OPTIONS, "mode": mode, "progress": False})


@pytest.fixture(scope="module")
def compiled() -> PreTrainedModel:
    return wrap("compile")


@pytest.fixture
def inputs(seed: int) -> dict[str, Tensor]:
    return mixed_prompts([7], 128, seed)


def negate(original: Function) -> Function:
    return lambda self, *args, **kwargs: -original(self, *args, **kwargs)


def negate_logits(original: Function) -> Function:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(self, *args, **kwargs)
        out.logits = -out.logits
        return out

    return forward


def negate_first(original: Function) -> Function:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        first, *others = original(self, *args, **kwargs)
        return -first, *others

    return forward


REPLACED: dict[str, tuple[Any, str, Callable[[Function], Function]]] = {
    "a method": (qwen3.Qwen3MLP, "forward", negate),
    "a norm's method": (qwen3.Qwen3RMSNorm, "forward", negate),
    "an attention's method": (qwen3.Qwen3Attention, "forward", negate_first),
    "a method of the model's class": (qwen3.Qwen3ForCausalLM, "forward", negate_logits),
    "a method of the base model's class": (qwen3.Qwen3Model, "forward", negate),
    "a method of torch's": (nn.Linear, "forward", negate),
    "an inherited method, overridden": (qwen3.Qwen3MLP, "__call__", negate),
    "a function of the model's file": (qwen3, "rotate_half", lambda _: lambda x: x),
    "a function of torch's": (nn.functional, "silu", negate),
}


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize("name", ["a method", "a method of the model's class", "a function of the model's file"])
def test_what_is_replaced_after_the_first_call_runs_in_the_next(name, compiled, inputs, monkeypatch):
    plain, before = tiny_qwen3(num_hidden_layers=1, eos_token_id=None), greedy(compiled, inputs, 6)
    owner, attribute, change = REPLACED[name]
    with monkeypatch.context() as patch:
        patch.setattr(owner, attribute, change(getattr(owner, attribute)))
        expected = greedy(plain, inputs, 6)
        assert not torch.equal(expected, before)
        torch.testing.assert_close(greedy(compiled, inputs, 6), expected)
    torch.testing.assert_close(greedy(compiled, inputs, 6), before)


@pytest.mark.usefixtures("without_inductor")
def test_whatever_is_replaced_is_noticed_until_it_is_put_back(compiled, inputs, monkeypatch):
    greedy(compiled, inputs, 3)
    programs = compiled.compiled.model_runner().graph_manager.programs
    noticed = {}
    for name, (owner, attribute, change) in REPLACED.items():
        assert programs.code_valid()
        with monkeypatch.context() as patch:
            patch.setattr(owner, attribute, change(getattr(owner, attribute)), raising=False)
            noticed[name] = not programs.code_valid()
    guarded = "a function of the model's file"  # by Dynamo
    assert noticed == {name: name != guarded for name in REPLACED}


@pytest.mark.usefixtures("without_inductor")
def test_what_no_program_runs_may_change_without_a_word(inputs, monkeypatch):
    model = wrap("compile")
    greedy(model, inputs, 3)
    programs = model.compiled.programs()
    for owner in (qwen3.Qwen3MLP, GradientCheckpointingLayer, qwen3.Qwen3ForCausalLM):
        monkeypatch.setattr(owner, "extra_repr", lambda self: "", raising=False)
        monkeypatch.setattr(owner, "something_new", 1, raising=False)
    greedy(model, inputs, 3)
    assert model.compiled.programs() == programs
    assert model.compiled.stats().recompiles == 0


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"cache_implementation": "static"}], ids=str)
def test_a_method_of_the_models_class_is_looked_up_in_every_call(options, inputs, monkeypatch):
    plain, wrapped = pair(eos_token_id=None)
    before = greedy(wrapped, inputs, 6, **options)
    monkeypatch.setattr(qwen3.Qwen3ForCausalLM, "forward", negate_logits(qwen3.Qwen3ForCausalLM.forward))
    expected = greedy(plain, inputs, 6, **options)
    assert not torch.equal(expected, before)
    torch.testing.assert_close(greedy(wrapped, inputs, 6, **options), expected)
    with torch.no_grad():
        torch.testing.assert_close(wrapped(**inputs).logits, plain(**inputs).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("without_inductor")
def test_a_callback_may_replace_a_method_in_the_middle_of_a_call(inputs, monkeypatch):
    model, plain = wrap("compile"), tiny_qwen3(num_hidden_layers=1, eos_token_id=None)
    results = []
    for each in (plain, model):
        with monkeypatch.context() as patch:

            def exchange(ids: Tensor, scores: Any, patch: Any = patch) -> Tensor:
                if ids.shape[1] == 10:
                    patch.setattr(qwen3.Qwen3MLP, "forward", negate(qwen3.Qwen3MLP.forward))
                return torch.zeros(len(ids), dtype=torch.bool)

            results.append(greedy(each, inputs, 8, stopping_criteria=[exchange]))
    torch.testing.assert_close(results[1], results[0])
    assert not torch.equal(results[0], greedy(plain, inputs, 8))
