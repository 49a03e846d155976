"""On a GPU no call waits while a thread compiles what it would draft with, and captures go on meanwhile."""

from __future__ import annotations

import time

import pytest
import torch

import compiled_llm
from compiled_llm.compilation.graphs.step_key import StepKey
from support.execution.twins import OPTIONS, small_qwen3
from support.gpu import needs_cuda
from support.parity import assert_account_is_empty, greedy

pytestmark = [pytest.mark.gpu, needs_cuda]

NEW = 200


def test_a_call_drafts_once_a_thread_has_compiled_for_it(caplog: pytest.LogCaptureFixture) -> None:
    model = compiled_llm.wrap(small_qwen3(0), **OPTIONS)
    ids = torch.tensor([[5, 6, 7, 8] * 8], device="cuda")
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def drafted() -> int:
        used = model.compiled.events.used
        return sum(count for key, count in used.items() if isinstance(key, StepKey) and key.accepts)

    greedy(model, inputs, NEW)  # what plain steps need is compiled
    beside = model.compiled.model_runner().graph_manager.beside
    begun = time.perf_counter()
    greedy(model, inputs, NEW, prompt_lookup_num_tokens=7)
    first, compiling = time.perf_counter() - begun, beside.running
    assert compiling, "the call was over before its program was there"
    assert drafted() == 0
    while beside.running:  # captures of other sizes go on, and come to their ends
        greedy(model, inputs, 20)
        greedy(model, {name: own.repeat(2, 1) for name, own in inputs.items()}, 20)
    took = time.perf_counter() - begun
    begun = time.perf_counter()
    greedy(model, inputs, NEW, prompt_lookup_num_tokens=7)
    taken = time.perf_counter() - begun
    assert drafted() > 0
    print(f"first call {first:.2f} s, compiled after {took:.1f} s; the call with the program's first run {taken:.2f} s")
    assert not any("tokens each" in waited for waited in map(str, model.compiled.events.cold_starts))
    assert not any(row.failures for row in model.compiled.cuda_graphs)
    assert "could not be captured" not in caplog.text
    assert model.compiled.stats().recompiles == 0
    assert_account_is_empty(model)
    compiled_llm.unwrap(model)
