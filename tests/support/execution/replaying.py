"""CUDA graphs, replayed as a step does."""

from __future__ import annotations

from compiled_llm.compilation.graphs.capture import CapturedGraph, Outputs


def replayed(graph: CapturedGraph[Outputs]) -> Outputs:
    """Launch a graph, and return the tensors that it writes."""
    graph.launch()
    assert graph.outputs is not None, "it was released"
    return graph.outputs
