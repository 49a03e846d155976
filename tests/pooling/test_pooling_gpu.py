"""Embeddings on a GPU, where captured prefills give them, beside answers whose captured prefills give logits."""

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
@pytest.mark.parametrize("bound", [{}, {"max_graphs": 24}], ids=["unbounded", "bounded"])
def test_replays_give_the_vectors_of_huggingface_s_forward(bound: dict[str, int], seed: int) -> None:
    model = compiled_llm.wrap(small_qwen3(seed), **{**OPTIONS, "progress": False, **bound})
    prompts, params = some_prompts(4, seed, longest=60), SamplingParams(temperature=0.0, max_tokens=8)
    device = model.device
    plain = small_qwen3(seed).to(device).base_model
    expected = torch.stack([plain(torch.tensor([each], device=device)).last_hidden_state[0, -1] for each in prompts])
    with Engine(model) as engine:
        engine.generate(prompts, params)
        for rows in (4, 1) * 4:  # one runs in the step of four, while its own is captured
            engine.reset_prefix_cache()
            found = engine.embed(prompts[:rows], pooling="last")
            assert torch.cosine_similarity(found, expected[:rows].float().cpu()).min() > 0.999
            engine.reset_prefix_cache()
            assert len(engine.generate(prompts[:1], params)[0].token_ids) == 8
    assert any(row.states and row.replays for row in model.compiled.cuda_graphs)
    assert not any(row.failures for row in model.compiled.cuda_graphs)
    assert (model.compiled.stats().recompiles, model.compiled.stats().graph_breaks) == (0, 0)
    compiled_llm.unwrap(model)
