"""Counters by which the programs of a kernel find the last of them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

SLAB = 2**18  # counters allocated at a time


class CounterSpan(NamedTuple):
    """Counters of one launch, or free ones: those of a slab from ``start`` to ``end``."""

    slab: int
    start: int
    end: int


class CapturedCounters:
    """Counters of captured launches, each launch its own until its graph is gone: graphs hold addresses only."""

    # One thread captures, while other threads give back the counters of released graphs.

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._slabs: list[Tensor] = []
        self._free: list[CounterSpan] = []  # in order, and no two of them touch
        self._taken: list[CounterSpan] = []

    @property
    def nbytes(self) -> int:
        """Size of all, in bytes."""
        return sum(slab.nbytes for slab in self._slabs)

    def make_room(self) -> None:
        """Reserve counters for a graph that is about to be captured, which begins to take its own."""
        with self._lock:
            self._taken = []
            if max((end - start for _, start, end in self._free), default=0) < SLAB // 2:
                self._slabs.append(self._new_slab())
                self._free.append(CounterSpan(len(self._slabs) - 1, 0, SLAB))

    def take(self, count: int) -> Tensor | None:
        """Return ``[count]`` int32 zeros at a multiple of 16 bytes, or None if so many are not left."""
        size = -(-count // 4) * 4
        with self._lock:
            at = next((at for at, (_, start, end) in enumerate(self._free) if end - start >= size), None)
            if at is None:
                return None
            slab, start, end = self._free[at]
            self._free[at : at + 1] = [CounterSpan(slab, start + size, end)] if end - start > size else []
            self._taken.append(CounterSpan(slab, start, start + size))
            return self._slabs[slab][start : start + count]

    def taken(self) -> list[CounterSpan]:
        """Return the counters taken since ``make_room``, to be given back."""
        taken = self._taken
        self._taken = []
        return taken

    def give_back(self, taken: Iterable[CounterSpan]) -> None:
        """Take back the counters of a graph that runs no more: its last launch has left them zero."""
        with self._lock:
            merged: list[CounterSpan] = []
            for span in sorted([*self._free, *taken]):
                if merged and merged[-1].slab == span.slab and merged[-1].end == span.start:
                    span = merged.pop()._replace(end=span.end)
                merged.append(span)
            self._free = merged

    def _new_slab(self) -> Tensor:
        # Cudagraph trees let a thread allocate from a graph's memory before they capture it; a new thread does not.
        with ThreadPoolExecutor(1) as other_thread:
            return other_thread.submit(_zeroed, self._device).result()


class ZeroedCounters:
    """Counters that are zero before a launch, and that the kernel leaves zero."""

    # Launches that may run at the same time cannot share them. The streams of a captured graph's replays are unknown,
    # but it never runs twice at once: each captured launch gets its own counters, a few KB for each graph, and they
    # need not be zeroed at each replay. The capturing caller may own them; else they live as long as the process. Other
    # launches get counters that are zeroed for them.

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: dict[torch.device, CapturedCounters] = {}
        self._thread = threading.local()

    @contextmanager
    def owned_by(self, owner: CapturedCounters) -> Iterator[None]:
        """Take the counters for this thread's captures in the block from an owner that outlives the graph."""
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
