"""While requests run, Python's full garbage collections, which stop all threads, come less often."""

# A process that has compiled a model has some hundred thousand objects, and to go through all of them takes half a
# second. Only cycles of old objects wait longer for it; all else is freed as ever.

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

RAISED_BY = 100
"""How many times less often all objects are looked through; not never, since requests may run on and on."""

MOST = 2**31 - 1
"""The largest threshold that Python takes."""


class GcThresholds:
    """The thresholds of the process, which blocks of any threads raise together."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks = 0
        self._before = self._during = gc.get_threshold()

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Raise the threshold for full collections for the block; thresholds that change meanwhile stay as they are."""
        with self._lock:
            self._blocks += 1
            if self._blocks == 1:
                self._before = gc.get_threshold()
                self._during = (*self._before[:2], min(RAISED_BY * self._before[2], MOST))
                gc.set_threshold(*self._during)
        try:
            yield
        finally:
            with self._lock:
                self._blocks -= 1
                if not self._blocks and gc.get_threshold() == self._during:
                    gc.set_threshold(*self._before)


gc_thresholds = GcThresholds()
