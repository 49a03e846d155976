"""The read bandwidth that results are compared with, measured in the same run."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

REPEATS = 12


def read_bandwidth(device: torch.device, dtype: torch.dtype) -> float:
    """Return bytes/s that the device reads at best, by a sum or a matrix-vector product."""
    # Both read far more than its caches hold: 4 GiB on CUDA or a quarter of what is free, 512 MiB on a CPU.
    size = 2**29
    if device.type == "cuda":
        size = min(2**32, torch.cuda.mem_get_info(device)[0] // 4)
    numbers = torch.ones(size // 4, device=device)
    best = size / _shortest(lambda: numbers.sum(), device)
    matrix = numbers.view(dtype)[: size // dtype.itemsize // 8192 * 8192].view(-1, 8192)
    vector = torch.ones(8192, device=device, dtype=dtype)
    return max(best, matrix.nbytes / _shortest(lambda: torch.mv(matrix, vector), device))


def _shortest(work: Callable[[], object], device: torch.device) -> float:
    work()
    seconds = _event_seconds if device.type == "cuda" else _wall_seconds
    return min(seconds(work) for _ in range(REPEATS))


def _wall_seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _event_seconds(work: Callable[[], object]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
