"""Steps in pieces on a GPU: attention is launched between them, and tokens are as exact as HuggingFace's."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import compiled_llm
from compiled_llm.compilation.graphs.capture import GraphCapture
from compiled_llm.compilation.graphs.piecewise import GraphInPieces, unowned
from compiled_llm.compilation.graphs.table import mib
from support.execution.replaying import replayed
from support.execution.twins import (
    DEVICE,
    OPTIONS,
    WINDOWED,
    assert_parity,
    parity,
    prompts_on_device,
    small_qwen3,
    twins_of,
)
from support.execution.two_layers import TwoLayers
from support.gpu import needs_cuda
from support.parity import assert_account_is_empty, greedy

pytestmark = [pytest.mark.gpu, needs_cuda]


@pytest.mark.parametrize("backend", ["auto", "flashinfer", "triton", "reference"])
@pytest.mark.parametrize("overrides", [{}, WINDOWED], ids=["full", "sliding and full"])
def test_steps_in_pieces_are_as_exact_as_huggingface(backend: Any, overrides: dict[str, Any], seed: int) -> None:
    twins = twins_of(small_qwen3(seed, **overrides), mode="piecewise", backend=backend, progress=False)
    layers = twins.wrapped.config.num_hidden_layers
    for lengths in ([1, 15, 16, 17, 33, 64, 100, 250], [100], [7, 7, 7], [1, 15, 16, 17, 33, 64, 100, 250], [100]):
        assert_parity(parity(twins, lengths, 60, seed))
    stats, table = twins.wrapped.compiled.stats(), twins.wrapped.compiled.cuda_graphs
    print(table)
    assert (stats.graph_breaks, stats.recompiles, stats.cudagraph_skips) == (0, 0, 0)
    assert stats.cuda_graphs == 4
    assert [row.rows for row in table if row.phase == "decode" and not row.replays] == [OPTIONS["max_batch_size"]]
    entries = twins.wrapped.compiled.model_runner().state.step_table._ready
    assert {entry.cuda_graph._graph.pieces for entry in entries} == {layers + 1}  # type: ignore[union-attr]
    assert_account_is_empty(twins.wrapped)
    compiled_llm.unwrap(twins.wrapped)


def test_pieces_share_the_pool_as_one_graph_would(seed: int) -> None:
    """What attention reads and returns is not kept from the pool until the next replay."""
    taken: dict[str, int] = {}
    modes: tuple[Any, ...] = ("cuda-graphs", "piecewise")
    for mode in modes:
        model = compiled_llm.wrap(small_qwen3(seed, num_hidden_layers=12), **OPTIONS, mode=mode, progress=False)
        model.compiled.warmup([1])
        table = model.compiled.cuda_graphs
        print(table)
        taken[mode] = table.shared_bytes
        greedy(model, prompts_on_device([300], seed), 20)
        assert model.compiled.cuda_graphs.captures == table.captures, "nothing was missing"
        compiled_llm.unwrap(model)
        del model
        gc.collect()
        torch.cuda.empty_cache()
    print({mode: mib(nbytes) for mode, nbytes in taken.items()})
    assert taken["piecewise"] <= 1.5 * taken["cuda-graphs"] + 4 * 2**20


def assert_near(actual: Any, expected: Any) -> None:
    """Equal but for the order of sums: what reads from or writes to the wrong place is far away."""
    torch.testing.assert_close(tuple(actual), tuple(expected), atol=2e-2, rtol=2e-2)


def test_a_replay_computes_what_a_launch_does_with_what_there_is_by_then(seed: int) -> None:
    layers = TwoLayers(seed, DEVICE, torch.bfloat16)
    capturer = GraphCapture(torch.device(DEVICE, torch.cuda.current_device()), in_pieces=True)
    layers.step()
    cuda_graphs = [capturer.capture(layers.step) for _ in range(3)]
    for hidden in layers.inputs(5):
        layers.begin(hidden)
        expected = [tuple(out.clone() for out in layers.step()) for _ in range(3)]
        expected_pages = [pages.clone() for pages in layers.pages]
        layers.begin(hidden)
        torch.full((2**22,), float("nan"), device=DEVICE)  # what is free now holds this
        for cuda_graph, launched in zip(cuda_graphs, expected, strict=True):
            assert_near(replayed(cuda_graph), launched)
        assert_near(layers.pages, expected_pages)
    first, *others = cuda_graphs
    first.release()
    for cuda_graph in others:
        layers.begin(layers.inputs(1)[0])
        launched = tuple(out.clone() for out in layers.step())
        layers.lengths.sub_(1)
        assert_near(replayed(cuda_graph), launched)


def test_a_failed_capture_leaves_nothing_behind(seed: int) -> None:
    layers = TwoLayers(seed, DEVICE, torch.bfloat16)
    capturer = GraphCapture(torch.device(DEVICE, torch.cuda.current_device()), in_pieces=True)
    layers.step()

    def failing() -> None:
        layers.step()
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        capturer.capture(failing)
    assert all(bool(out.isfinite().all()) for out in layers.step())
    cuda_graph = capturer.capture(layers.step)
    layers.begin(layers.inputs(1)[0])
    launched = tuple(out.clone() for out in layers.step())
    layers.lengths.sub_(1)
    assert_near(replayed(cuda_graph), launched)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.uint8, torch.bool])
def test_a_tensor_that_does_not_keep_its_memory_is_the_same_otherwise(dtype: torch.dtype) -> None:
    for tensor in (torch.ones(4, 6, device=DEVICE).to(dtype), torch.ones(4, 6, device=DEVICE).to(dtype)[1:, ::2].T):
        other = unowned(tensor)
        assert (other.data_ptr(), other.shape, other.stride()) == (tensor.data_ptr(), tensor.shape, tensor.stride())
        assert (other.dtype, other.device) == (tensor.dtype, tensor.device)
        other.zero_()
        assert not bool(tensor.any())
    before = torch.cuda.memory_allocated()
    owner = torch.ones(2**20, device=DEVICE)
    view = unowned(owner)
    del owner
    assert torch.cuda.memory_allocated() == before
    assert view.numel() == 2**20


def test_a_graph_of_pieces_is_one_for_torch(seed: int) -> None:
    """``torch.cuda.graph`` begins and ends it as it does a graph of its own."""
    layers, graph = TwoLayers(seed, DEVICE, torch.bfloat16), GraphInPieces()
    layers.step()
    with torch.cuda.graph(graph, pool=torch.cuda.graph_pool_handle()):  # type: ignore[arg-type]
        outputs = layers.step()
    assert graph.pieces == 3
    layers.begin(layers.inputs(1)[0])
    launched = tuple(out.clone() for out in layers.step())
    layers.lengths.sub_(1)
    graph.replay()
    assert_near(outputs, launched)
