"""CUDA graphs of whole steps, captured around the compiled programs and replayed with one launch."""

# Cudagraph trees check every weight and every guard at each call, which takes the host longer than a small model takes
# the device. Our CUDA graphs are launched unchecked; ``validity`` checks whether they may still be replayed, when the
# model may have changed.
# A capture runs no kernels: it notes launches. So it may be made while steps run, in a thread of its own, which lives
# as long as the process: cuBLAS keeps its workspace for a thread and a stream, and graphs would go on using that of an
# ended thread. The thread works in slices, between the launches of steps, and may pause at each layer's attention.

from __future__ import annotations

import functools
import time
import weakref
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from compiled_llm.compat.torch.capturing import CaptureBrokenError, Graph, captured_into, new_graph
from compiled_llm.compilation.graphs.piecewise import GraphInPieces
from compiled_llm.compilation.graphs.slices import SlicedThread
from compiled_llm.compilation.graphs.step_table import Cost
from compiled_llm.kvcache.memory import wait_for
from compiled_llm_ops.attention.left_out import capture_of_this_thread
from compiled_llm_ops.kernels.counters import CapturedCounters, zeroed_counters

Outputs = TypeVar("Outputs")


TIMES_BROKEN = 10
"""How often a capture is tried again at once that another thread has broken, which is no failure of its own."""


class CapturedGraph(Generic[Outputs]):
    """Captured launches."""

    def __init__(self, graph: Graph, outputs: Outputs, cost: Cost, give_back: Callable[[], None]) -> None:
        """``outputs`` are the tensors that the graph writes; ``give_back`` is called when it is released."""
        self.cost = cost  # of their capture
        # launches the graph; of one that was captured whole, torch's own method
        self.launch: Callable[[], object] = graph.replay
        self._graph = graph
        self.outputs: Outputs | None = outputs  # the tensors that it writes
        self._give_back = give_back

    def release(self) -> None:
        self.outputs = None
        self._graph.reset()
        self._give_back()


class _Place(NamedTuple):
    """The stream and thread of a capturer's captures."""

    # only captures run on it: cuBLAS's workspace for it is allocated in a capture, from our pool, and stays valid for
    # as long as the process lives
    stream: torch.cuda.Stream
    thread: SlicedThread  # captures there


_idle: defaultdict[torch.device, list[_Place]] = defaultdict(list)
"""Captures whose graphs are all gone, for the next one: waking again and again would leave tens of MB each time."""


def _new_place(device: torch.device) -> _Place:
    thread = SlicedThread("compiled_llm capture", functools.partial(_begin_thread, device))
    return _Place(torch.cuda.Stream(device), thread)


def _begin_thread(device: torch.device) -> None:
    torch.cuda.set_device(device)
    torch.cuda.current_blas_handle()  # what makes it cannot be captured


def abandon(underway: Future[CapturedGraph[Outputs]]) -> None:
    """Release a graph as soon as its capture has ended."""

    def release(future: Future[CapturedGraph[Outputs]]) -> None:
        if future.exception() is None:
            future.result().release()

    underway.add_done_callback(release)


class GraphCapture:
    """The capturing of one model's steps, which share a memory pool."""

    def __init__(self, device: torch.device, *, in_pieces: bool = False) -> None:
        """``in_pieces``: leave out the ops that may be left out."""
        idle = _idle[device]
        self._device = device
        self._place = idle.pop() if idle else _new_place(device)
        weakref.finalize(self, idle.append, self._place).atexit = False
        self._in_pieces = in_pieces
        self._counters = CapturedCounters(device)
        self.take_new_pool()

    def take_new_pool(self) -> None:
        """Take a new memory pool: one whose graphs are all gone, or where a capture failed, cannot be used again."""
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, launch: Callable[[], Outputs]) -> CapturedGraph[Outputs]:
        """Capture ``launch`` while the model has no other capture; otherwise as ``begin``, or raise RuntimeError."""
        wait_for(self._device)
        torch.cuda.empty_cache()  # a pool grows only by what is free
        for attempt in range(TIMES_BROKEN + 1):
            underway = self.begin(launch)
            try:
                self.finish()
                return underway.result()
            except CaptureBrokenError:
                if attempt == TIMES_BROKEN:
                    raise
            except BaseException:  # an interrupt, too: it is captured to its end then
                abandon(underway)
                self.finish()
                raise
        raise AssertionError("the last attempt returns or raises")

    def begin(
        self, launch: Callable[[], Outputs], check: Callable[[], None] = lambda: None
    ) -> Future[CapturedGraph[Outputs]]:
        """Begin to capture ``launch``, in our thread and the slices to come, unless ``check`` raises before."""
        # Meanwhile steps run and graphs are replayed; none of these graphs is released, and no other begun. ``launch``
        # reads and writes tensors at fixed addresses only, without waiting.
        return self._place.thread.submit(functools.partial(self._capture, launch, check))

    def run_slices(self, ended: Callable[[], bool]) -> None:
        """Continue the capture underway for half a millisecond or so, and then on until its time has ``ended``."""
        self._place.thread.run_slices(ended)

    def finish(self) -> None:
        self._place.thread.finish()

    def _capture(self, launch: Callable[[], Outputs], check: Callable[[], None]) -> CapturedGraph[Outputs]:
        with torch.no_grad():
            check()
        pause = self._place.thread.pause
        pause()
        graph, start = self._new_graph(), time.perf_counter()
        self._counters.make_room()
        unpooled, reserved = self._unpooled(), torch.cuda.memory_reserved(self._device)
        launch = launch if self._in_pieces else _pausing(launch, pause)
        try:
            with torch.no_grad(), torch.cuda.stream(self._place.stream), zeroed_counters.owned_by(self._counters):
                outputs = captured_into(graph, self._pool, self._device, launch, self._place.thread.finish)
        except BaseException:
            self._counters.give_back(self._counters.taken())
            self.take_new_pool()
            raise
        grown = torch.cuda.memory_reserved(self._device) - reserved
        own = max(0, self._unpooled() - unpooled)
        spans = self._counters.taken()
        cost = Cost(own, max(0, grown), time.perf_counter() - start)
        return CapturedGraph(graph, outputs, cost, functools.partial(self._counters.give_back, spans))

    def _new_graph(self) -> Graph:
        return GraphInPieces(new_graph, self._place.thread.pause) if self._in_pieces else new_graph()

    def _unpooled(self) -> int:
        """Return the device memory used by all processes outside PyTorch's allocator: graphs, among others."""
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free - torch.cuda.memory_reserved(self._device)


class _Whole:
    """A capture without gaps: where an op could be left out, it may pause."""

    def __init__(self, pause: Callable[[], None]) -> None:
        self._pause = pause

    def leave_out(self, launch: Callable[[Any], Any], arguments: object, allocate: Callable[[Any], Any]) -> object:
        self._pause()
        return launch(arguments)


def _pausing(launch: Callable[[], Outputs], pause: Callable[[], None]) -> Callable[[], Outputs]:
    """Return a launch of the same step that may pause at each layer's attention."""

    def launch_pausing() -> Outputs:
        capture_of_this_thread(_Whole(pause))
        try:
            return launch()
        finally:
            capture_of_this_thread(None)

    return launch_pausing
