"""Counters by which the programs of a kernel find out which of them is the last."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

SLAB = 2**18
"""Counters allocated at a time."""


class ZeroedCounters:
    """Counters that are zero before a launch, and that the kernel leaves zero.

    Launches that may run at the same time cannot share them. Nobody knows on which streams a captured graph will be
    replayed, but it never runs twice at once: each captured launch gets its own counters for as long as the process
    lives, a few KB for each graph, and they need not be zeroed at each replay. Other launches get counters that are
    zeroed for them.
    """

    def __init__(self) -> None:
        """Allocate nothing yet."""
        self._lock = threading.Lock()
        self._slabs: list[Tensor] = []  # captured graphs hold addresses only
        self._left: dict[torch.device, Tensor] = {}

    def take(self, count: int, device: torch.device) -> Tensor:
        """Return ``[count]`` int32 zeros at a multiple of 16 bytes, for one launch on the current stream."""
        if device.type == "cuda":
            with self._lock:
                left = self._left.get(device)
                if not torch.cuda.is_current_stream_capturing():
                    if left is None or len(left) < SLAB // 2:
                        self._left[device] = self._new_slab(device)
                elif left is not None and len(left) >= count:
                    self._left[device] = left[-(-count // 4) * 4 :]
                    return left[:count]
        return torch.zeros(count, dtype=torch.int32, device=device)  # captured: at each replay

    def _new_slab(self, device: torch.device) -> Tensor:
        # Cudagraph trees let a thread allocate from a graph's memory before they capture it; a new thread does not.
        with ThreadPoolExecutor(1) as other_thread:
            slab = other_thread.submit(_zeroed, device).result()
        self._slabs.append(slab)
        return slab


def _zeroed(device: torch.device) -> Tensor:
    slab = torch.zeros(SLAB, dtype=torch.int32, device=device)
    torch.cuda.current_stream(device).synchronize()  # it is used on other streams
    return slab


zeroed_counters = ZeroedCounters()
