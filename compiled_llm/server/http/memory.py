"""Memory of long requests goes back to the system: the C library would keep it for others, which may never come."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

_SECONDS = 0.5  # after a long piece of work, so that its memory is free by then; at most once in that time


class Memory:
    """A timer that gives free memory back to the system, now and then; only glibc can."""

    def __init__(self) -> None:
        self._trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._lock = threading.Lock()
        self._timed = self._again = False

    def give_back_soon(self) -> None:
        """Give back, in another thread, the memory that will be free soon."""
        with self._lock:
            if self._timed:
                self._again = True
            elif self._trim is not None:
                self._time()

    def _time(self) -> None:
        self._timed, self._again = True, False
        timer = threading.Timer(_SECONDS, self._give_back)
        timer.daemon = True
        timer.start()

    def _give_back(self) -> None:
        self._trim(0)
        with self._lock:
            self._timed = False
            if self._again:  # what has ended since may not have been free yet
                self._time()


MEMORY = Memory()
