"""Times of launches as a model makes them: many in a row, of which none finds in a cache what it reads."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable

import torch
from torch import Tensor

from compiled_llm.compat.torch.capturing import captured_into, new_graph

LARGER_THAN_CACHES = 2**27
"""Bytes that launches go through in turn, so that each reads from memory as in a model: an H200 has 50 MB of L2."""

LAUNCHES, REPLAYS = 20, 5

NumberedLaunch = Callable[[int], object]
"""Makes one launch, told its number: by that it takes another copy of what it reads each time."""


def copies_of(tensor: Tensor) -> list[Tensor]:
    """Return as many tensors like this one as no cache holds, itself and at most so many copies as launches."""
    size = tensor.numel() * tensor.element_size()
    return [tensor, *(tensor.clone() for _ in range(min(LAUNCHES, LARGER_THAN_CACHES // size)))]


def captured(launch: NumberedLaunch) -> float:
    """Return the microseconds of a launch, captured many times in a row: the best of some replays.

    Infinite if the device has too little for a candidate. Whatever cannot be captured raises, and leaves torch able to
    go on.
    """
    from triton.runtime.errors import OutOfResources

    try:
        launch(0)  # compiles, outside of the capture
    except OutOfResources:
        return math.inf
    torch.cuda.synchronize()
    graph, device = new_graph(), torch.device("cuda", torch.cuda.current_device())

    def launch_all() -> None:
        for number in range(LAUNCHES):
            launch(number)

    with torch.cuda.stream(_stream_of_captures()):
        captured_into(graph, torch.cuda.graph_pool_handle(), device, launch_all)
    try:
        graph.replay()
        return 1000 * min(_milliseconds(graph.replay) for _ in range(REPLAYS)) / LAUNCHES
    finally:
        graph.reset()


@functools.cache
def _stream_of_captures() -> torch.cuda.Stream:
    """Return the same one each time: cuBLAS keeps a workspace for each stream."""
    return torch.cuda.Stream()


def _milliseconds(work: Callable[[], object]) -> float:
    """By the device's clock."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def by_the_clock(run: Callable[[], object], synchronize: Callable[[], object], seconds: float = 0.2) -> float:
    """Microseconds of a run, launches of the host included: the best of as many runs as take so long."""
    run()
    best, end = math.inf, time.perf_counter() + seconds
    while time.perf_counter() < end:
        synchronize()
        start = time.perf_counter()
        run()
        synchronize()
        best = min(best, time.perf_counter() - start)
    return best * 1e6
