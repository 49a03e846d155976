"""What a capture needs of torch: it can be ended when it has failed, and the allocator can be told of it."""

from __future__ import annotations

import pytest
import torch

from compiled_llm.compat.torch import capturing, cudagraph_trees
from support.in_threads import in_thread


def test_a_capture_that_fails_is_ended(monkeypatch):
    class Graph:
        def __init__(self) -> None:
            self.calls: list[str] = []

        def capture_begin(self, pool, capture_error_mode):
            self.calls.append(f"begin {capture_error_mode}")

        def capture_end(self):
            self.calls.append("end")
            if broken:
                raise RuntimeError("invalidated")

        def reset(self):
            self.calls.append("reset")

    def fail():
        raise ValueError("no launch")

    told: list[str] = []
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *given: told.append("ended"))
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda *given: told.append("released"))
    device, broken = torch.device("cuda", 0), False
    graph = Graph()
    assert capturing.captured_into(graph, (0, 1), device, lambda: 5) == 5
    assert graph.calls == ["begin thread_local", "end"]
    with pytest.raises(ValueError, match="no launch"):
        capturing.captured_into(graph := Graph(), (0, 1), device, fail)
    assert (graph.calls, told) == (["begin thread_local", "end", "reset"], [])
    broken = True
    for launch in (fail, lambda: 5):
        with pytest.raises((ValueError, RuntimeError)):
            capturing.captured_into(graph := Graph(), (0, 1), device, launch)
        assert graph.calls[-1] == "reset"
        assert capturing._ended_badly.pop() is graph, "it may be asked for as long as the process lives"
    assert (told, capturing._ended_badly) == (["ended", "released"] * 2, [])


def test_graphs_without_generators_can_tell_the_allocator():
    """Needed before torch 2.12, whose ``CUDAGraph`` no longer keeps other threads from drawing random numbers."""
    assert all(hasattr(torch._C, f"_cuda_{name}") for name in ("beginAllocateCurrentThreadToPool", "releasePool"))


def test_a_thread_that_never_had_cudagraph_trees_has_recorded_none():
    """Before torch 2.13 only the thread that imports them first has any, and to ask for them fails in all others."""
    cudagraph_trees.prepare_cudagraph_trees()
    assert in_thread(lambda: cudagraph_trees.cudagraph_tree_graphs(torch.device("cuda:0"))) == 0


def test_messages_about_cuda_graphs_are_collected():
    from torch._inductor.cudagraph_utils import log_cudagraph_skip_and_bump_counter

    before = cudagraph_trees.cudagraph_skips()
    with cudagraph_trees.cudagraph_messages() as messages:
        log_cudagraph_skip_and_bump_counter("skipping cudagraphs due to a test")
    assert messages == ["skipping cudagraphs due to a test"]
    assert cudagraph_trees.cudagraph_skips() == before + 1
