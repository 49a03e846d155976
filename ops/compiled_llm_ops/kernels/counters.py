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

    No two launches that may run at the same time can share them. On which streams a recording will be replayed nobody
    knows, but it never runs twice at once: each launch in a recording gets counters of its own for as long as the
    process lives, a few KB a recording, and none of them has to be zeroed at each replay. A launch outside of
    recordings gets counters that were zeroed for it.
    """

    def __init__(self) -> None:
        """Allocate nothing yet."""
        self._lock = threading.Lock()
        self._slabs: list[Tensor] = []  # recordings hold addresses only
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
        return torch.zeros(count, dtype=torch.int32, device=device)  # in a recording: at each replay

    def _new_slab(self, device: torch.device) -> Tensor:
        # Cudagraph trees let a thread allocate from a recording's memory before they record; a new one does not.
        with ThreadPoolExecutor(1) as other_thread:
            slab = other_thread.submit(_zeroed, device).result()
        self._slabs.append(slab)
        return slab


def _zeroed(device: torch.device) -> Tensor:
    slab = torch.zeros(SLAB, dtype=torch.int32, device=device)
    torch.cuda.current_stream(device).synchronize()  # it is used on other streams
    return slab


zeroed_counters = ZeroedCounters()
