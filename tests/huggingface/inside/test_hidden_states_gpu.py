"""Hidden states and traced hooks of captured steps on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import compiled_llm
from support.execution.twins import OPTIONS, prompts_on_device, small_qwen3
from support.gpu import needs_cuda
from support.parity import greedy

pytestmark = [pytest.mark.gpu, needs_cuda]

ASKED: dict[str, Any] = {"return_dict_in_generate": True, "output_hidden_states": True}


def test_replays_give_the_states_of_each_step_and_what_hooks_emit(seed: int) -> None:
    """Of one row and of several, whose hidden states the next replay overwrites; the norm gives the last ones."""
    model = compiled_llm.wrap(small_qwen3(seed), **{**OPTIONS, "progress": False})

    def read(module: Any, args: Any, output: Any, tokens: Any) -> None:
        tokens.emit("last", output)

    with compiled_llm.traced_hook(model.model.norm, read):
        for lengths in ([9], [50, 9, 17], [50, 9, 17]):
            inputs = prompts_on_device(lengths, seed)
            outs = [greedy(model, inputs, 30, output_logits=True, **ASKED) for _ in range(3)]
            for out in outs:
                assert torch.equal(out.sequences, outs[0].sequences)
                for states, last, logits in zip(out.hidden_states, out.emitted["last"], out.logits, strict=True):
                    assert torch.equal(states[-1], last)
                    ours = model.lm_head(states[-1][:, -1]).float()
                    torch.testing.assert_close(ours, logits, rtol=0.02, atol=0.05)
    table = model.compiled.cuda_graphs
    assert any(row.states and row.replays for row in table)
    stats = model.compiled.stats()
    assert (stats.recompiles, stats.graph_breaks) == (0, 0)
    compiled_llm.unwrap(model)
