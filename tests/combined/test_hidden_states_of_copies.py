"""Hidden states of models that programs run as shallow copies, which are there before the first request for states."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

import compiled_llm
from compiled_llm import Engine, SamplingParams
from support.packed_layers import BLOCK, bnb_nf4, packed_model
from support.tiny_models import tiny_qwen3

PROMPT = [5, 6, 7, 8, 9]
OPTIONS: dict[str, Any] = {"max_batch_size": 4, "kv_memory": "2000 tokens", "progress": False, "mode": "compile"}


def adapted(model: Any) -> Any:
    lora = LoraConfig(r=4, target_modules=["q_proj", "o_proj", "down_proj"], init_lora_weights=False)
    return get_peft_model(model, lora).eval().get_base_model()


def packed(model: Any) -> Any:
    return packed_model(model, lambda linear: linear if linear.in_features % BLOCK else bnb_nf4(linear))


def scale_norms(model: Any) -> None:
    """Write into the first layer, so that its copy is made again."""
    for parameter in model.model.layers[0].parameters():
        if parameter.dim() == 1 and parameter.is_floating_point():
            parameter.data.mul_(1.3)


@pytest.mark.usefixtures("one_thread", "without_inductor")
@pytest.mark.parametrize("made", [adapted, packed])
def test_states_after_plain_answers_a_write_and_a_sleep_are_huggingfaces(made: Callable[[Any], Any]) -> None:
    torch.manual_seed(0)
    model = made(tiny_qwen3(0, eos_token_id=None, num_hidden_layers=2))
    bare, params = copy.deepcopy(model), SamplingParams(max_tokens=6, temperature=0.0)
    compiled_llm.wrap(model, **OPTIONS)
    with Engine(model, max_num_seqs=2) as engine:
        engine.generate([PROMPT], params)
        for _ in range(3):
            output = engine.submit(PROMPT, params, hidden_states=[-1]).result()
            with torch.no_grad():
                text = torch.tensor([[*PROMPT, *output.token_ids]])
                expected = bare(text, output_hidden_states=True).hidden_states[-1][0]
            states = output.outputs[0].hidden_states
            assert states is not None
            torch.testing.assert_close(states[-1], expected[: len(states[-1])], atol=1e-4, rtol=1e-4)
            for each in (model, bare):
                scale_norms(each)
            engine.sleep(weights=True, graphs=True)
            engine.wake()
