"""Hidden states of an engine's requests on a GPU, whose captured steps overwrite them."""

from __future__ import annotations

import pytest
import torch

import compiled_llm
from compiled_llm.engine.engine import Engine
from compiled_llm.requests.sampling_params import SamplingParams
from engine.test_engine import some_prompts
from support.execution.twins import OPTIONS, small_qwen3
from support.gpu import needs_cuda

pytestmark = [pytest.mark.gpu, needs_cuda]


@torch.no_grad()
def test_the_last_layers_states_give_the_log_probabilities_of_each_token(seed: int) -> None:
    model = compiled_llm.wrap(small_qwen3(seed), **{**OPTIONS, "progress": False})
    params = SamplingParams(seed=seed, max_tokens=40, ignore_eos=True, logprobs=0)
    with Engine(model) as engine:
        for _ in range(3):
            for output in engine.generate(some_prompts(4, seed, longest=60), params, hidden_states=[0, -1]):
                assert output.hidden_states is not None
                states = output.hidden_states[-1].to(model.device)
                assert len(states) == len(output.prompt_token_ids) + 39
                table = torch.log_softmax(model.lm_head(states[-40:]).float(), dim=-1)
                tokens = torch.tensor(output.token_ids, device=table.device)
                ours = table.gather(1, tokens[:, None])[:, 0].sum().item()
                assert ours == pytest.approx(output.outputs[0].cumulative_logprob, abs=0.5)
    assert (model.compiled.stats().recompiles, model.compiled.stats().graph_breaks) == (0, 0)
    assert any(row.states and row.replays for row in model.compiled.cuda_graphs)
    compiled_llm.unwrap(model)
