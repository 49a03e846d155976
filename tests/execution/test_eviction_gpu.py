"""CUDA graphs make room for others on a GPU: memory stays as it was, and the others compute the same bits."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import compiled_llm
from compiled_llm.compilation.graphs.capture import CapturedGraph, GraphCapture
from compiled_llm.compilation.graphs.step_key import StepKey
from compiled_llm.execution.model_runner import ModelRunner
from support.execution.replaying import replayed
from support.execution.twins import DEVICE, OPTIONS, prompts_on_device, small_qwen3
from support.gpu import needs_cuda
from support.parity import assert_account_is_empty, greedy

pytestmark = [pytest.mark.gpu, pytest.mark.whole_device, needs_cuda]

CAPTURES = 1000


@pytest.fixture
def wrapped(seed: int) -> Iterator[Callable[..., PreTrainedModel]]:
    models: list[PreTrainedModel] = []

    def wrap(**options: Any) -> PreTrainedModel:
        models.append(compiled_llm.wrap(small_qwen3(seed), **{**OPTIONS, "progress": False, **options}))
        return models[-1]

    yield wrap
    for model in models:
        compiled_llm.unwrap(model)
    models.clear()
    gc.collect()
    torch.cuda.empty_cache()


def taken() -> int:
    """Bytes of the device that are not free, when nothing runs and nothing is cached."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip("other tests take memory of the device meanwhile; run this one without -n")
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def record(model_runner: ModelRunner, number: int) -> None:
    """Have one more decode step or prefill captured, unless it is."""
    shapes = [shape for rows in (1, 4) for shape in model_runner.prefill.shapes.of_rows(rows)[:8]]
    decodes = [StepKey.decode(bucket) for bucket in (1, 2, 4, 8, 16, 17)]
    if number % 2:
        model_runner.thread.call(model_runner.steps.ready, decodes[number // 2 % len(decodes)])
    else:
        model_runner.thread.call(model_runner.prefill.launches.capture_shapes, [shapes[number // 2 % len(shapes)]])


def test_memory_is_flat_over_a_thousand_cuda_graphs(wrapped: Callable[..., PreTrainedModel], seed: int) -> None:
    model = wrapped(max_graphs=4)
    model_runner = model.compiled.model_runner()
    inputs = prompts_on_device([5, 18, 40], seed)
    before = taken()
    for number in range(60):
        record(model_runner, number)
    expected = greedy(model, inputs, 20)
    settled, seen, number = taken(), [], 60
    while model.compiled.cuda_graphs.captures < CAPTURES:
        record(model_runner, number)
        number += 1
        if number % 100 == 0:
            seen.append(taken())
    table = model.compiled.cuda_graphs
    print(f"{before / 2**20:.1f} MiB before, {settled / 2**20:.1f} settled, then", [f"{n / 2**20:.1f}" for n in seen])
    print(table)
    assert table.ready <= 4
    assert table.evictions >= CAPTURES - 4
    assert max(seen) <= settled * 1.01
    assert taken() <= settled * 1.01
    counters = model_runner.graph_manager.cuda_graphs._capturer._counters  # type: ignore[union-attr]
    assert counters.nbytes <= 2 * 2**20
    torch.testing.assert_close(greedy(model, inputs, 20), expected)
    assert model.compiled.stats().recompiles == 0
    assert_account_is_empty(model)


def test_what_was_evicted_gives_its_memory_back(wrapped: Callable[..., PreTrainedModel]) -> None:
    model = wrapped()
    model.compiled.warmup([1])
    model_runner = model.compiled.model_runner()
    few = taken()
    for number in range(100):
        record(model_runner, number)
    many, steps = taken(), model_runner.state.step_table
    table = model.compiled.cuda_graphs
    print(table)

    def evict() -> None:
        latest = steps.of("decode", "prefill")[:2]
        for key in steps.of("decode", "prefill"):
            if key not in latest:
                steps._evict(steps.get(key))  # type: ignore[arg-type]
        torch.cuda.current_stream().synchronize()
        assert steps.release_ended()

    model_runner.thread.call(evict)
    after = taken()
    print(f"{few / 2**20:.1f} MiB with few, {many / 2**20:.1f} with {table.ready}, {after / 2**20:.1f} after")
    assert model.compiled.cuda_graphs.ready == 2
    assert after <= many  # the pool goes with its last graph, and the driver may keep what graphs took for others
    model_runner.thread.call(model_runner.graph_manager.cuda_graphs.forget)
    assert taken() <= few * 1.01


class Matmuls:
    """A graph of matmuls that need a workspace: few rows and columns, and long sums that cuBLAS splits."""

    def __init__(self, capturer: GraphCapture, rows: int, seed: int) -> None:
        generator = torch.Generator(DEVICE).manual_seed(seed)
        self.left = torch.randn(rows, 16384, generator=generator, device=DEVICE).bfloat16()
        self.right = torch.randn(16384, 256, generator=generator, device=DEVICE).bfloat16()
        self.out = torch.empty(rows, 256, device=DEVICE)
        self.launch()
        self.captured: CapturedGraph[Tensor] = capturer.capture(self.launch)
        self.expected = replayed(self.captured).clone()

    def launch(self) -> Tensor:
        first = self.left @ self.right
        return self.out.copy_(first.float() + torch.relu(first @ self.right[:256, :256]).float())

    def check(self) -> None:
        self.out.fill_(float("nan"))
        assert torch.equal(replayed(self.captured), self.expected)


def test_the_others_compute_the_same_bits_after_an_eviction(seed: int) -> None:
    """cuBLAS keeps its workspace when a graph dies, or at least what lies there is mapped and nobody else's."""
    capturer = GraphCapture(torch.device(DEVICE, torch.cuda.current_device()))
    graphs = [Matmuls(capturer, rows, seed + rows) for rows in (1, 8, 64, 128)]
    for round_ in range(8):
        graphs.pop(0).captured.release()
        torch.cuda.empty_cache()
        filled = [
            torch.full((2**20 * size,), 7.0, device=DEVICE) for size in (1, 2, 8, 32, 64)
        ]  # where it was, if freed
        for graph in graphs:
            graph.check()
        graphs.append(Matmuls(capturer, (1, 8, 64, 128)[round_ % 4], seed + round_))
        for _ in range(3):
            for graph in graphs:
                graph.check()
        assert all(bool((tensor == 7.0).all()) for tensor in filled), "a workspace was written after it was freed"
        del filled


def test_memory_that_one_step_does_not_fit_into_is_refused(wrapped: Callable[..., PreTrainedModel], seed: int) -> None:
    model = wrapped(graph_memory="1KiB")
    with pytest.raises(ValueError, match=r"give at least graph_memory=\d+"):
        greedy(model, prompts_on_device([5, 9], seed), 4)
    assert_account_is_empty(model)
