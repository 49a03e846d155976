"""Counters by which the programs of a kernel find out which of them is the last."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor

SLAB = 2**18
"""Counters allocated at a time."""


class CapturedCounters:
    """Counters of captured launches, each launch its own, for as long as this lives: graphs hold addresses only."""

    def __init__(self, device: torch.device) -> None:
        """Allocate nothing yet."""
        self._device = device
        self._slabs: list[Tensor] = []
        self._left: Tensor | None = None

    def make_room(self) -> None:
        """Have counters for a graph that is about to be captured."""
        if self._left is None or len(self._left) < SLAB // 2:
            self._left = self._new_slab()

    def take(self, count: int) -> Tensor | None:
        """Return ``[count]`` int32 zeros at a multiple of 16 bytes, or None if so many are not left."""
        left = self._left
        if left is None or len(left) < count:
            return None
        self._left = left[-(-count // 4) * 4 :]
        return left[:count]

    def _new_slab(self) -> Tensor:
        # Cudagraph trees let a thread allocate from a graph's memory before they capture it; a new thread does not.
        with ThreadPoolExecutor(1) as other_thread:
            slab = other_thread.submit(_zeroed, self._device).result()
        self._slabs.append(slab)
        return slab


class ZeroedCounters:
    """Counters that are zero before a launch, and that the kernel leaves zero.

    Launches that may run at the same time cannot share them. Nobody knows on which streams a captured graph will be
    replayed, but it never runs twice at once: each captured launch gets its own counters, a few KB for each graph, and
    they need not be zeroed at each replay. Whoever captures may own them; else they live as long as the process. Other
    launches get counters that are zeroed for them.
    """

    def __init__(self) -> None:
        """Allocate nothing yet."""
        self._lock = threading.Lock()
        self._process: dict[torch.device, CapturedCounters] = {}
        self._thread = threading.local()

    @contextmanager
    def owned_by(self, owner: CapturedCounters) -> Iterator[None]:
        """Let what this thread captures in the block have the counters of an owner that outlives the graph."""
        self._thread.owner = owner
        try:
            yield
        finally:
            self._thread.owner = None

    def take(self, count: int, device: torch.device) -> Tensor:
        """Return ``[count]`` int32 zeros at a multiple of 16 bytes, for one launch on the current stream."""
        if device.type == "cuda":
            owner: CapturedCounters | None = getattr(self._thread, "owner", None)
            with self._lock:
                captured = owner or self._process.setdefault(device, CapturedCounters(device))
                if not torch.cuda.is_current_stream_capturing():
                    captured.make_room()
                elif (counters := captured.take(count)) is not None:
                    return counters
        return torch.zeros(count, dtype=torch.int32, device=device)  # captured: at each replay


def _zeroed(device: torch.device) -> Tensor:
    slab = torch.zeros(SLAB, dtype=torch.int32, device=device)
    torch.cuda.current_stream(device).synchronize()  # it is used on other streams
    return slab


zeroed_counters = ZeroedCounters()
