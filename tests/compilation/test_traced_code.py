"""Methods and functions that a program was traced from are watched; ``test_model_changes`` shows the next call."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.qwen3 import modeling_qwen3 as qwen3

import compiled_llm
from support.execution.model_changes import CODE
from support.parity import FEW_PAGES, greedy, mixed_prompts
from support.tiny_models import tiny_qwen3

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("without_inductor")]

INPUTS = mixed_prompts([7], 128, seed=0)


@pytest.fixture
def model() -> Any:
    model = compiled_llm.wrap(tiny_qwen3(num_hidden_layers=1, eos_token_id=None), **FEW_PAGES)
    greedy(model, INPUTS, 3)
    return model


def test_whatever_is_replaced_is_noticed_and_so_is_that_it_is_put_back(model):
    version = model.compiled.facts.version

    def code() -> int:
        version.begin_check()
        return version.code

    for name, change in CODE.items():
        before = code()
        assert code() == before
        with ExitStack() as stack:
            change.make(stack)
            by_dynamo = name == "a function of the model's file"
            changed = code()
            assert (changed == before) == by_dynamo, name
        assert (code() == changed) == by_dynamo, name


@pytest.mark.whole
def test_what_no_program_runs_may_change_without_a_word(model, monkeypatch):
    programs = model.compiled.programs()
    for owner in (qwen3.Qwen3MLP, GradientCheckpointingLayer, qwen3.Qwen3ForCausalLM):
        monkeypatch.setattr(owner, "extra_repr", lambda self: "", raising=False)
        monkeypatch.setattr(owner, "something_new", 1, raising=False)
    greedy(model, INPUTS, 3)
    assert model.compiled.programs() == programs
    assert model.compiled.stats().recompiles == 0
