"""CUDA graphs of whole steps, recorded around the compiled programs and replayed with one launch.

Cudagraph trees look at every weight and run every guard in Python's reach at each call, which takes the host longer
than a small model takes the device. A recording of ours is launched by itself; whether what it holds of the model is
still so is for ``watch`` to say, when something may have changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from compiled_llm.compilation.graphs.validity import Guards

Inputs = TypeVar("Inputs")
Outputs = TypeVar("Outputs")


class Recording(Generic[Inputs, Outputs]):
    """One recorded step.

    Attributes:
        inputs: the tensors that it reads, to be filled before it is replayed.
        guards: what the compiled program inside takes for granted.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, inputs: Inputs, outputs: Outputs, guards: Guards) -> None:
        """Keep the graph with the tensors that it reads and writes."""
        self._graph = graph
        self._outputs = outputs
        self.inputs = inputs
        self.guards = guards

    def replay(self) -> Outputs:
        """Launch on the current stream; returns the same tensors each time, overwritten."""
        self._graph.replay()
        return self._outputs


class Recorder:
    """Records the steps of one model; all of them share a memory pool.

    Attributes:
        count: how many have been recorded.
    """

    def __init__(self, device: torch.device) -> None:
        """Record nothing yet."""
        # Nothing else ever runs on this stream: cuBLAS's workspace for it is allocated in a capture, from our pool,
        # and stays valid for as long as the graphs do.
        self._stream = torch.cuda.Stream(device)
        self.begin_anew()
        self.count = 0

    def begin_anew(self) -> None:
        """Take a new memory pool: one whose recordings are all gone cannot be recorded into again."""
        self._pool = torch.cuda.graph_pool_handle()

    def record(
        self, launch: Callable[[], Outputs], inputs: Inputs, guards: Callable[[], Guards]
    ) -> Recording[Inputs, Outputs]:
        """Record what ``launch`` launches, which has run at least once before.

        Args:
            launch: reads and writes tensors at fixed addresses only, and waits for nothing.
            inputs: those among them that change from step to step.
            guards: returns what it took for granted.

        Raises:
            RuntimeError: something in it cannot be recorded.
        """
        graph = torch.cuda.CUDAGraph()
        # Other threads go on using the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            outputs = launch()
        self.count += 1
        return Recording(graph, inputs, outputs, guards())
