"""Decode with FlashInfer's kernels and in plain PyTorch: the independent checks of our own decode kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import compiled_llm
from compiled_llm.compilation.graphs.step_key import StepKey
from compiled_llm_ops.protocol import Plan
from support.execution.twins import assert_parity, in_float32, parity, prompts_on_device, small_qwen3, twins_of
from support.parity import assert_account_is_empty, greedy

pytestmark = pytest.mark.gpu

LENGTHS = [1, 15, 16, 17, 33, 64, 100, 250]
WINDOWED = {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 100, "max_window_layers": 2}


@pytest.mark.parametrize(
    ("backend", "mode"),
    [
        ("flashinfer", "eager"),
        ("flashinfer", "compile"),
        ("flashinfer", "reduce-overhead"),
        ("flashinfer", "cuda-graphs"),
        ("flashinfer", "piecewise"),
        ("triton", "eager"),
        ("triton", "compile"),
        ("triton", "reduce-overhead"),
        ("triton", "cuda-graphs"),
        ("triton", "piecewise"),
        ("reference", "piecewise"),
        ("reference", "eager"),
    ],
)
@pytest.mark.parametrize("layers", ["full", "sliding and full"])
def test_logits_are_as_exact_as_huggingfaces_on_each_backend(backend: str, mode: str, layers: str, seed: int) -> None:
    twins = twins_of(small_qwen3(seed, **(WINDOWED if layers != "full" else {})), backend=backend, mode=mode)
    for lengths in (LENGTHS, [100]):
        assert_parity(parity(twins, lengths, 120, seed))
    stats = twins.wrapped.compiled.stats()
    assert (stats.graph_breaks, stats.recompiles, stats.cudagraph_skips) == (0, 0, 0)
    # With graphs of ours, the largest one too, in which all can run.
    assert stats.cuda_graphs == {"reduce-overhead": 2, "cuda-graphs": 3, "piecewise": 3}.get(mode, 0)
    assert_account_is_empty(twins.wrapped)
    compiled_llm.unwrap(twins.wrapped)


def test_auto_runs_without_a_compiler_for_flashinfer(seed: int, problems: dict[str, list[str]]) -> None:
    problems["flashinfer"] = ["nvcc is not found"]
    twins = twins_of(small_qwen3(seed))
    assert_parity(parity(twins, LENGTHS, 60, seed))
    assert twins.wrapped.compiled.stats().backend == "triton"
    compiled_llm.unwrap(twins.wrapped)


@pytest.mark.parametrize("mode", ["eager", "cuda-graphs"])
def test_float32_has_the_tokens_of_huggingface(mode: Any, seed: int) -> None:
    plain = in_float32(small_qwen3(seed))
    inputs = prompts_on_device([9, 100, 33], seed)
    expected = greedy(plain, inputs, 60)
    model = compiled_llm.wrap(plain, backend="triton", mode=mode, max_batch_size=4, kv_memory="16384 tokens")
    assert torch.equal(greedy(model, inputs, 60), expected)
    compiled_llm.unwrap(model)


def test_a_captured_step_keeps_its_partition_while_rows_grow(seed: int) -> None:
    """The numbers that a captured launch has read stay what they are; what the kernels read on the device changes."""
    model = compiled_llm.wrap(small_qwen3(seed), backend="flashinfer", max_batch_size=4, kv_memory="16384 tokens")
    model.compiled.warmup([4])
    (plan,) = plans_of(model, StepKey.decode(4))
    numbers, tensor = plan.numbers.clone(), plan.tensor.clone()
    for lengths in ([3, 9, 2, 5], [900, 2, 30, 400]):
        greedy(model, prompts_on_device(lengths, seed), 40)
        assert torch.equal(plan.numbers, numbers)
        assert not torch.equal(plan.tensor, tensor), "nothing was planned"
    assert model.compiled.recaptures() == (0, [])
    compiled_llm.unwrap(model)


def plans_of(model: Any, step: StepKey) -> list[Plan]:
    return model.compiled.model_runner()._planner._plans[step]
