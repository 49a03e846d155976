"""Capturing a CUDA graph in one thread while others go on computing, replaying and drawing random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch

Outputs = TypeVar("Outputs")

_ended_badly: list[torch.cuda.CUDAGraph] = []
"""Nothing tells the allocator of pinned memory that their captures ended: it goes on asking them, by their address."""


def captured_into(
    graph: torch.cuda.CUDAGraph, pool: Any, device: torch.device, launch: Callable[[], Outputs]
) -> Outputs:
    """Capture the launches of ``launch`` on the current stream of this thread, and return its result.

    Unlike in ``torch.cuda.graph``, nothing waits for the device, and the allocator keeps its cached memory. Whatever
    fails, this thread and the allocator can go on, but with another pool.

    ``graph`` is a new one; ``pool``, for the allocations of ``launch``, is one of ``torch.cuda.graph_pool_handle``.
    RuntimeError if an operation of ``launch``, which must not wait, cannot be captured.
    """
    try:
        with generator_of_its_own(device):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            outputs = launch()
        except BaseException:
            with suppress(RuntimeError):
                _end(graph, pool, device)
            raise
        _end(graph, pool, device)
    except BaseException:
        graph.reset()
        raise
    return outputs


def _end(graph: torch.cuda.CUDAGraph, pool: Any, device: torch.device) -> None:
    try:
        graph.capture_end()
    except RuntimeError:
        # It says so before it tells the allocator, which would look for this capture at each allocation from now on.
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(device.index, pool)
            torch._C._cuda_releasePool(device.index, pool)
        _ended_badly.append(graph)
        raise


@contextmanager
def generator_of_its_own(device: torch.device) -> Iterator[None]:
    """Give a capture that begins in the block random numbers of its own.

    Before torch 2.12 a generator either is captured or not, in all threads; the default one always was, and until the
    capture had ended, a thread that drew from it or replayed another graph got an error.
    """
    if torch.__version__ >= (2, 12):  # type: ignore[operator]
        yield
        return
    default = torch.cuda.default_generators[device.index]
    before = default.graphsafe_get_state()
    default.graphsafe_set_state(torch.Generator(device))
    try:
        yield
    finally:
        default.graphsafe_set_state(before)
