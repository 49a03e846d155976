"""A program is an entry of a list: a further one is compiled, served and counted like the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import compiled_llm
from compiled_llm.compilation import program_list, programs
from compiled_llm.compilation.inputs import DecodeInputs
from compiled_llm.compilation.program import Program
from compiled_llm.compilation.program_list import DECODE_MANY, PROGRAMS
from compiled_llm.compilation.steps import decode_step
from support.parity import greedy, mixed_prompts
from support.tiny_models import tiny_qwen3

OPTIONS: dict[str, Any] = {"page_size": 4, "kv_memory": "800 tokens", "max_batch_size": 4, "progress": False}
TWO_ROWS = "decode, batch 2"


@pytest.mark.whole
@pytest.mark.usefixtures("without_inductor")
def test_a_further_program_is_an_entry(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def noted(inputs: Any) -> bool:
        return isinstance(inputs, DecodeInputs) and inputs.slots.shape[0] == 2

    def options(*given: Any) -> dict[str, Any]:
        calls.append(len(given))
        return {}

    listed = (Program(TWO_ROWS, noted, decode_step, options, decodes=True), *PROGRAMS)
    for module in (program_list, programs):
        monkeypatch.setattr(module, "PROGRAMS", listed)
    reference, model = (tiny_qwen3(num_hidden_layers=1, eos_token_id=None) for _ in range(2))
    compiled_llm.wrap(model, mode="compile", **OPTIONS)
    for lengths, expected in (([5, 9], {TWO_ROWS: 1, DECODE_MANY: 0}), ([3, 4, 5], {TWO_ROWS: 1, DECODE_MANY: 1})):
        inputs = mixed_prompts(lengths, 128, seed)
        torch.testing.assert_close(greedy(model, inputs, 8), greedy(reference, inputs, 8))
        graphs = model.compiled.model_runner().graph_manager.programs.graph_counts()
        assert {name: graphs[name] for name in expected} == expected
    stats = model.compiled.stats()
    assert (calls, stats.graph_breaks, stats.recompiles) == ([2], 0, 0)
