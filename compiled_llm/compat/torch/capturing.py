"""Capturing a CUDA graph in one thread while others go on computing, replaying and drawing random numbers."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import torch

from compiled_llm.compat.torch.gate import GATE

logger = logging.getLogger("compiled_llm.graphs")

Outputs = TypeVar("Outputs")


class Graph(Protocol):
    """The methods of ``torch.cuda.CUDAGraph`` that capturing and replaying need."""

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None: ...
    def capture_end(self) -> None: ...
    def replay(self) -> None: ...
    def reset(self) -> None: ...


_ended_badly: list[Graph] = []
"""Nothing tells the allocator of pinned memory that their captures ended: it goes on asking them, by their address."""


def new_graph() -> Graph:
    """Return a graph that is captured on its thread's current stream, while other threads may draw random numbers."""
    # Before torch 2.12 a generator either is captured or not, in all threads. ``CUDAGraph`` always captured the default
    # one: until the capture had ended, a thread that drew from it or replayed another graph got an error.
    if torch.__version__ >= (2, 12) or _runtime() is None:  # type: ignore[operator]
        return torch.cuda.CUDAGraph()
    return GraphWithoutGenerators()


def captured_into(
    graph: Graph,
    pool: object,
    device: torch.device,
    launch: Callable[[], Outputs],
    finish: Callable[[], None] | None = None,
) -> Outputs:
    """Capture ``launch``, which must not wait, on this thread's stream.

    Args:
        finish: brings the capture to its end if it goes on in time slices; other threads call it that need the device.

    Raises:
        CaptureBrokenError: another thread has waited for the device; the same capture may succeed if it is tried again.
        RuntimeError: an operation in it cannot be captured.
    """
    # Unlike in ``torch.cuda.graph``, nothing waits for the device, and the allocator keeps its cached memory. Whatever
    # fails, this thread and the allocator can go on, but with another ``pool``, one of
    # ``torch.cuda.graph_pool_handle``.
    with GATE.entered("capture", device, finish):
        try:
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                outputs = launch()
            except BaseException:
                with suppress(RuntimeError):
                    _end(graph, pool, device)
                raise
            _end(graph, pool, device)
        except RuntimeError as error:
            graph.reset()
            # A call of this thread's that cannot be captured raises another error, and is the first to raise any.
            if _INVALIDATED in str(error):
                raise CaptureBrokenError(str(error)) from error
            raise
        except BaseException:
            graph.reset()
            raise
    return outputs


def _end(graph: Graph, pool: Any, device: torch.device) -> None:
    try:
        graph.capture_end()
    except RuntimeError:
        # It says so before it tells the allocator, which would look for this capture at each allocation from now on.
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(device.index, pool)
            torch._C._cuda_releasePool(device.index, pool)
        _ended_badly.append(graph)
        raise


class CaptureBrokenError(RuntimeError):
    """Another thread has waited for the whole device while this one captured: it says nothing about the capture."""


_INVALIDATED = "previous error during capture"
"""The words of cudaErrorStreamCaptureInvalidated: a capture was ended by a call before the one that raises it."""


_CAPTURE_MODES = {"global": 0, "thread_local": 1, "relaxed": 2}
_AUTO_FREE_ON_LAUNCH, _USE_NODE_PRIORITY = 1, 8


class GraphWithoutGenerators:
    """A ``torch.cuda.CUDAGraph`` in which no random numbers can be drawn, and which leaves all generators alone."""

    def __init__(self) -> None:
        self._device, self._stream = -1, 0
        self._pool: Any = None
        self._executable = ctypes.c_void_p()

    def capture_begin(self, pool: Any, capture_error_mode: str = "global") -> None:
        self._device = torch.cuda.current_device()
        self._stream = torch.cuda.current_stream().cuda_stream
        torch._C._cuda_beginAllocateCurrentThreadToPool(self._device, pool)  # first, as ``CUDAGraph`` does
        try:
            _call("cudaStreamBeginCapture", self._stream, _CAPTURE_MODES[capture_error_mode])
        except BaseException:
            torch._C._cuda_endAllocateToPool(self._device, pool)
            torch._C._cuda_releasePool(self._device, pool)
            raise
        self._pool = pool

    def capture_end(self) -> None:
        """End the capture; a RuntimeError, if it is invalid, leaves the allocator as it is, as in ``CUDAGraph``."""
        graph, pool, self._pool = ctypes.c_void_p(), self._pool, None
        _call("cudaStreamEndCapture", self._stream, ctypes.byref(graph))
        torch._C._cuda_endAllocateToPool(self._device, pool)
        self._pool = pool
        try:
            flags = _AUTO_FREE_ON_LAUNCH | _USE_NODE_PRIORITY
            _call("cudaGraphInstantiateWithFlags", ctypes.byref(self._executable), graph, flags)
        finally:
            _call("cudaGraphDestroy", graph)

    def replay(self) -> None:
        """Launch on the current stream."""
        _call("cudaGraphLaunch", self._executable, torch._C._cuda_getCurrentRawStream(self._device))

    def reset(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            torch._C._cuda_releasePool(self._device, pool)
        executable, self._executable = self._executable, ctypes.c_void_p()
        if executable:
            _call("cudaGraphExecDestroy", executable)

    def __del__(self) -> None:
        with suppress(Exception):  # at the end of a process
            self.reset()


_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cudaStreamBeginCapture": (ctypes.c_void_p, ctypes.c_int),
    "cudaStreamEndCapture": (ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)),
    "cudaGraphInstantiateWithFlags": (ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p, ctypes.c_ulonglong),
    "cudaGraphLaunch": (ctypes.c_void_p, ctypes.c_void_p),
    "cudaGraphDestroy": (ctypes.c_void_p,),
    "cudaGraphExecDestroy": (ctypes.c_void_p,),
}


@functools.cache
def _runtime() -> ctypes.CDLL | None:
    """Return the CUDA runtime that torch has loaded; None, said once, if it is linked into torch."""
    with suppress(OSError):
        runtime = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")
        for name, arguments in _SIGNATURES.items():
            getattr(runtime, name).argtypes = arguments
        runtime.cudaGetErrorString.restype = ctypes.c_char_p
        return runtime
    logger.warning(
        "compiled_llm: torch's CUDA runtime is no library of its own: threads that draw random numbers "
        "while a CUDA graph is captured may get an error; use torch 2.12 or newer"
    )
    return None


def _call(name: str, *arguments: object) -> None:
    """Call a function of the CUDA runtime; RuntimeError if it fails."""
    runtime = _runtime()
    assert runtime is not None, "only `new_graph` makes a `GraphWithoutGenerators`"
    if error := getattr(runtime, name)(*arguments):
        runtime.cudaGetLastError()  # or the next call of torch's would report it
        raise RuntimeError(f"{name}: CUDA error {error}: {runtime.cudaGetErrorString(error).decode()}")
