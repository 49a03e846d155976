"""Who cannot compile is told the line and the call that tells more, and is spared torch's traceback."""

from __future__ import annotations

import pickle
import traceback
from typing import Any

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

import compiled_llm
from support import planted_faults as planted
from support.parity import assert_account_is_empty, greedy, mixed_prompts
from support.planted_faults import plant
from support.tiny_models import ONE_LAYER, tiny_qwen3

OPTIONS = {"mode": "compile", "page_size": 4, "kv_memory": "400 tokens", "max_batch_size": 4, "progress": False}
MORE = "compiled_llm.explain(model)"


def shown(error: BaseException) -> str:
    """What Python prints of an error that nobody catches."""
    return "".join(traceback.format_exception(error))


def test_a_refusal_names_the_users_line_and_spares_them_torchs_traceback():
    model = plant(planted.Branch)
    with pytest.raises(compiled_llm.UnsupportedModelError) as caught:
        compiled_llm.wrap(model, mode="eager")
    said = str(caught.value)
    assert "planted_faults.py" in said
    assert "`if x.abs().max() > 3:  # planted`" in said
    assert said.endswith(f"{MORE} says more, and what to do")
    assert "/torch/" not in shown(caught.value)
    assert caught.value.cause is not None
    assert "fake_tensor.py" in shown(caught.value.cause)


class OwnMask(Qwen3Attention):
    def forward(self, hidden_states, position_embeddings, attention_mask=None, *args, **kwargs):
        mask = torch.ones(1, 1, hidden_states.shape[1], hidden_states.shape[1])
        return super().forward(hidden_states, position_embeddings, mask, *args, **kwargs)  # planted


def test_a_refusal_of_what_a_layer_asks_for_names_the_line_that_asks():
    model: Any = tiny_qwen3()
    model.model.layers[0].self_attn.__class__ = OwnMask
    with pytest.raises(
        compiled_llm.UnsupportedModelError, match=r"mask of its own.*\*\*kwargs\)  # planted`"
    ) as caught:
        compiled_llm.wrap(model, mode="eager")
    assert MORE in str(caught.value)
    assert caught.value.cause is None


@pytest.mark.core
@pytest.mark.usefixtures("without_inductor")
def test_what_cannot_be_compiled_is_named_and_taken_out_it_runs():
    model = compiled_llm.wrap(plant(planted.Print), **OPTIONS)
    inputs = mixed_prompts([4], 128, seed=0)
    with pytest.raises(compiled_llm.CompileError) as caught:
        greedy(model, inputs, 3)
    said = str(caught.value)
    assert said.startswith("prefill_step cannot be compiled as one graph: ")
    assert '`print("mlp", x.shape)  # planted`' in said
    assert said.endswith(f"{MORE} names the lines and says what to do")
    assert "from user code" not in shown(caught.value)
    assert "from user code" in str(caught.value.cause)
    assert_account_is_empty(model)
    model.model.layers[0].mlp.__class__ = planted.PrintDeleted
    assert greedy(model, inputs, 3).shape == (1, 7)


@pytest.mark.usefixtures("without_inductor")
def test_what_fails_after_tracing_is_no_fault_of_the_models_lines(monkeypatch):
    def fail(*args: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("compiled_llm.compilation.backend.compile_with_inductor", fail)
    model = compiled_llm.wrap(tiny_qwen3(**ONE_LAYER), **OPTIONS)
    with pytest.raises(RuntimeError, match="no space left") as caught:
        greedy(model, mixed_prompts([4], 128, seed=0), 3)
    assert not isinstance(caught.value, compiled_llm.CompileError)


@pytest.mark.parametrize("kind", [compiled_llm.CompileError, compiled_llm.UnsupportedModelError])
def test_the_errors_can_be_sent_to_another_process(kind):
    error = pickle.loads(pickle.dumps(kind("why")))
    assert (str(error), error.cause) == ("why", None)
