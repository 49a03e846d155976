"""CUDA graphs of whole steps, captured around the compiled programs and replayed with one launch.

Cudagraph trees check every weight and every guard at each call, which takes the host longer than a small model takes
the device. A recording of ours is launched by itself; ``validity`` checks whether it may still be replayed, when
something may have changed.

A capture runs nothing on the device: it notes launches. So it may be made while steps run, in a thread of its own,
which lives as long as the process: cuBLAS keeps what it allocates for a thread and a stream, and of a thread that ends,
graphs would go on using it.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, NamedTuple, TypeVar, cast

import torch

from compiled_llm.compat import captured_into, generator_of_its_own
from compiled_llm.compilation.graphs.pieces import GraphInPieces
from compiled_llm.compilation.graphs.rolling import Cost
from compiled_llm.kvcache.memory import wait_for
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


class _Place(NamedTuple):
    """Where a recorder captures.

    Attributes:
        stream: nothing else ever runs on it: cuBLAS's workspace for it is allocated in a capture, from our pool, and
            stays valid for as long as the process lives.
        thread: one.
    """

    stream: torch.cuda.Stream
    thread: ThreadPoolExecutor


_idle: defaultdict[torch.device, list[_Place]] = defaultdict(list)
"""Those of recorders whose graphs are all gone. A model that sleeps and wakes again and again would leave tens of MB
each time, so the next recorder has them."""


def _new_place(device: torch.device) -> _Place:
    thread = ThreadPoolExecutor(1, "compiled_llm recorder", _begin_thread, (device,))
    return _Place(torch.cuda.Stream(device), thread)


def _begin_thread(device: torch.device) -> None:
    torch.cuda.set_device(device)
    torch.cuda.current_blas_handle()  # what makes it cannot be captured


def abandon(underway: Future[Captured[Outputs]]) -> None:
    """Release what is captured as soon as it is."""

    def release(future: Future[Captured[Outputs]]) -> None:
        if future.exception() is None:
            future.result().release()

    underway.add_done_callback(release)


class Recorder:
    """Captures the steps of one model; all of them share a memory pool."""

    def __init__(self, device: torch.device, *, in_pieces: bool = False) -> None:
        """Capture nothing yet; ``in_pieces`` leaves out what may be left out."""
        idle = _idle[device]
        self._device = device
        self._place = idle.pop() if idle else _new_place(device)
        weakref.finalize(self, idle.append, self._place).atexit = False
        pieces = functools.partial(GraphInPieces, beginning=functools.partial(generator_of_its_own, device))
        self._new_graph: Callable[[], Any] = pieces if in_pieces else torch.cuda.CUDAGraph
        self._counters = CapturedCounters(device)
        self.take_new_pool()

    def take_new_pool(self) -> None:
        """Take a new memory pool: one whose graphs are all gone, or where one failed, cannot be captured into again."""
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, launch: Callable[[], Outputs]) -> Captured[Outputs]:
        """Capture what ``launch`` launches while nothing else runs; otherwise as ``begin``.

        Raises:
            RuntimeError: something in it cannot be captured.
        """
        wait_for(self._device)
        torch.cuda.empty_cache()  # a pool grows only by what is free
        underway = self.begin(launch)
        try:
            return underway.result()
        except BaseException:  # an interrupt, too: it goes on then
            abandon(underway)
            raise

    def begin(
        self, launch: Callable[[], Outputs], check: Callable[[], None] = lambda: None
    ) -> Future[Captured[Outputs]]:
        """Begin to capture what ``launch`` launches, which has run at least once before; it is called in our thread.

        Meanwhile steps run and graphs are replayed; none of this recorder's is released, and no other begun.

        Args:
            launch: reads and writes tensors at fixed addresses only, and waits for nothing.
            check: called before; if it raises, nothing is captured.
        """
        return self._place.thread.submit(self._capture, launch, check)

    def _capture(self, launch: Callable[[], Outputs], check: Callable[[], None]) -> Captured[Outputs]:
        with torch.no_grad():
            check()
        graph, start = self._new_graph(), time.perf_counter()
        self._counters.make_room()
        unpooled, reserved = self._unpooled(), torch.cuda.memory_reserved(self._device)
        try:
            with torch.no_grad(), torch.cuda.stream(self._place.stream), zeroed_counters.owned_by(self._counters):
                outputs = captured_into(graph, self._pool, self._device, launch)
        except BaseException:
            self._counters.give_back(self._counters.taken())
            self.take_new_pool()
            raise
        grown = torch.cuda.memory_reserved(self._device) - reserved
        own = max(0, self._unpooled() - unpooled)
        spans = self._counters.taken()
        cost = Cost(own, max(0, grown), time.perf_counter() - start)
        return Captured(graph, outputs, cost, functools.partial(self._counters.give_back, spans))

    def _unpooled(self) -> int:
        """Return what is taken of the device beside PyTorch's allocator, by all processes: graphs, among others."""
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free - torch.cuda.memory_reserved(self._device)
