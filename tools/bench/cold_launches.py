"""Timing launches on a GPU as a model makes them: many in a row, of which none finds in a cache what it reads."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from compiled_llm.compat.torch.capturing import captured_into, new_graph

LARGER_THAN_CACHES = 2**27
"""Bytes that launches go through in turn, so that each reads from memory as in a model: an H200 has 50 MB of L2."""

LAUNCHES, REPLAYS = 20, 5

NumberedLaunch = Callable[[int], object]
"""Makes one launch, told its number: by that it takes another copy of what it reads each time."""


def copies_of(tensor: Tensor, most: int = LAUNCHES) -> list[Tensor]:
    """Return as many tensors like this one as no cache holds, itself and at most so many copies."""
    size = tensor.numel() * tensor.element_size()
    return [tensor, *(tensor.clone() for _ in range(min(most, LARGER_THAN_CACHES // size)))]


def captured(launch: NumberedLaunch, launches: int = LAUNCHES, replays: int = REPLAYS) -> float:
    """Return the microseconds of a launch, captured many times in a row: the best of some replays.

    Whatever cannot be captured raises, and leaves torch able to go on.
    """
    launch(0)  # compiles, outside of the capture
    torch.cuda.synchronize()
    graph, device = new_graph(), torch.device("cuda", torch.cuda.current_device())
    with torch.cuda.stream(_stream_of_captures()):
        captured_into(graph, torch.cuda.graph_pool_handle(), device, lambda: _launch_all(launch, launches))
    try:
        graph.replay()
        return _best(graph.replay, replays) / launches
    finally:
        graph.reset()


def launched(launch: NumberedLaunch, launches: int = LAUNCHES, replays: int = REPLAYS) -> float:
    """Return the microseconds of a launch by the host, so many in a row; the host's own time counts if it is longer."""
    _launch_all(launch, launches)
    return _best(lambda: _launch_all(launch, launches), replays) / launches


def _launch_all(launch: NumberedLaunch, launches: int) -> None:
    for number in range(launches):
        launch(number)


@functools.cache
def _stream_of_captures() -> torch.cuda.Stream:
    """Return the same one each time: cuBLAS keeps a workspace for each stream."""
    return torch.cuda.Stream()


def _best(work: Callable[[], object], times: int) -> float:
    """Return the shortest of some times in microseconds, by the device's clock."""
    found: list[float] = []
    for _ in range(times):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end))
    return 1000 * min(found)
