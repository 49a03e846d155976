"""CUDA graphs of whole steps, captured around the compiled programs and replayed with one launch.

Cudagraph trees check every weight and every guard at each call, which takes the host longer than a small model takes
the device. A recording of ours is launched by itself; ``validity`` checks whether it may still be replayed, when
something may have changed.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from compiled_llm.compilation.graphs.validity import Guards
from compiled_llm_ops.kernels.counters import CapturedCounters, zeroed_counters

Inputs = TypeVar("Inputs")
Outputs = TypeVar("Outputs")


class Captured(Generic[Outputs]):
    """Launches that were captured."""

    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: Outputs) -> None:
        """Keep the graph with the tensors that it writes."""
        self._graph = graph
        self._outputs = outputs

    def replay(self) -> Outputs:
        """Launch on the current stream; returns the same tensors each time, overwritten."""
        self._graph.replay()
        return self._outputs


class Recording(Captured[Outputs], Generic[Inputs, Outputs]):
    """One captured step.

    Attributes:
        inputs: the tensors that it reads, to be filled before it is replayed.
        guards: what the compiled program inside takes for granted.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, inputs: Inputs, outputs: Outputs, guards: Guards) -> None:
        """Keep the graph with the tensors that it reads and writes."""
        super().__init__(graph, outputs)
        self.inputs = inputs
        self.guards = guards


_idle_streams: defaultdict[torch.device, list[torch.cuda.Stream]] = defaultdict(list)
"""Those of recorders whose graphs are all gone."""


class Recorder:
    """Captures the steps of one model; all of them share a memory pool.

    Attributes:
        count: how many have been captured.
    """

    def __init__(self, device: torch.device) -> None:
        """Capture nothing yet."""
        # Nothing else ever runs on this stream: cuBLAS's workspace for it is allocated in a capture, from our pool,
        # and stays valid for as long as the process lives. So the next recorder has it: a model that sleeps and wakes
        # again and again would leave tens of MB each time.
        idle = _idle_streams[device]
        self._stream = idle.pop() if idle else torch.cuda.Stream(device)
        weakref.finalize(self, idle.append, self._stream).atexit = False
        self._counters = CapturedCounters(device)
        self.take_new_pool()
        self.count = 0

    def take_new_pool(self) -> None:
        """Take a new memory pool: one whose graphs are all gone cannot be captured into again."""
        self._pool = torch.cuda.graph_pool_handle()

    def record(
        self, launch: Callable[[], Outputs], inputs: Inputs, guards: Callable[[], Guards]
    ) -> Recording[Inputs, Outputs]:
        """Capture what ``launch`` launches, which has run at least once before.

        Args:
            launch: reads and writes tensors at fixed addresses only, and waits for nothing.
            inputs: those among them that change from step to step.
            guards: returns what ``launch`` took for granted.

        Raises:
            RuntimeError: something in it cannot be captured.
        """
        graph, outputs = self._capture(launch)
        return Recording(graph, inputs, outputs, guards())

    def capture(self, launch: Callable[[], Outputs]) -> Captured[Outputs]:
        """Capture launches that take nothing of the model for granted; otherwise as ``record``."""
        return Captured(*self._capture(launch))

    def _capture(self, launch: Callable[[], Outputs]) -> tuple[torch.cuda.CUDAGraph, Outputs]:
        graph = torch.cuda.CUDAGraph()
        self._counters.make_room()
        # Other threads go on using the device meanwhile.
        captured = torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
        with zeroed_counters.owned_by(self._counters), captured:
            outputs = launch()
        self.count += 1
        return graph, outputs
