"""CUDA graphs of whole steps, captured around the compiled programs and replayed with one launch.

Cudagraph trees check every weight and every guard at each call, which takes the host longer than a small model takes
the device. A recording of ours is launched by itself; ``validity`` checks whether it may still be replayed, when
something may have changed.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import torch

from compiled_llm.compilation.graphs.pieces import GraphInPieces
from compiled_llm.compilation.graphs.rolling import Cost
from compiled_llm_ops.kernels.counters import CapturedCounters, zeroed_counters

Outputs = TypeVar("Outputs")


class Captured(Generic[Outputs]):
    """Launches that were captured.

    Attributes:
        cost: what that took.
    """

    def __init__(
        self, graph: torch.cuda.CUDAGraph | GraphInPieces, outputs: Outputs, cost: Cost, give_back: Callable[[], None]
    ) -> None:
        """Keep the graph with the tensors that it writes.

        Args:
            graph: of the launches.
            outputs: the tensors that it writes.
            cost: what capturing it took.
            give_back: called when it is released.
        """
        self.cost = cost
        self._graph = graph
        self._outputs: Outputs | None = outputs
        self._give_back = give_back

    def replay(self) -> Outputs:
        """Launch on the current stream; returns the same tensors each time, overwritten."""
        self._graph.replay()
        return cast(Outputs, self._outputs)

    def release(self) -> None:
        """Give back what the graph takes; it is replayed no more."""
        self._outputs = None
        self._graph.reset()
        self._give_back()


_idle_streams: defaultdict[torch.device, list[torch.cuda.Stream]] = defaultdict(list)
"""Those of recorders whose graphs are all gone."""


class Recorder:
    """Captures the steps of one model; all of them share a memory pool.

    Attributes:
        count: how many have been captured.
    """

    def __init__(self, device: torch.device, *, in_pieces: bool = False) -> None:
        """Capture nothing yet; ``in_pieces`` leaves out what may be left out."""
        # Nothing else ever runs on this stream: cuBLAS's workspace for it is allocated in a capture, from our pool,
        # and stays valid for as long as the process lives. So the next recorder has it: a model that sleeps and wakes
        # again and again would leave tens of MB each time.
        idle = _idle_streams[device]
        self._device = device
        self._new_graph: Callable[[], Any] = GraphInPieces if in_pieces else torch.cuda.CUDAGraph
        self._stream = idle.pop() if idle else torch.cuda.Stream(device)
        weakref.finalize(self, idle.append, self._stream).atexit = False
        self._counters = CapturedCounters(device)
        self.take_new_pool()
        self.count = 0

    def take_new_pool(self) -> None:
        """Take a new memory pool: one whose graphs are all gone cannot be captured into again."""
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, launch: Callable[[], Outputs]) -> Captured[Outputs]:
        """Capture what ``launch`` launches, which has run at least once before.

        Args:
            launch: reads and writes tensors at fixed addresses only, and waits for nothing.

        Raises:
            RuntimeError: something in it cannot be captured.
        """
        graph, start = self._new_graph(), time.perf_counter()
        self._counters.make_room()
        # Other threads go on using the device meanwhile.
        capturing = torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
        unpooled = self._unpooled()
        try:
            with zeroed_counters.owned_by(self._counters), capturing:
                before = torch.cuda.memory_reserved(self._device)  # what is cached has just been emptied
                outputs = launch()
                grown = torch.cuda.memory_reserved(self._device) - before
        except BaseException:
            self._counters.give_back(self._counters.taken())
            raise
        self.count += 1
        own = max(0, self._unpooled() - unpooled)
        spans = self._counters.taken()
        cost = Cost(own, max(0, grown), time.perf_counter() - start)
        return Captured(graph, outputs, cost, functools.partial(self._counters.give_back, spans))

    def _unpooled(self) -> int:
        """Return what is taken of the device beside PyTorch's allocator, by all processes: graphs, among others."""
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free - torch.cuda.memory_reserved(self._device)
