"""Measures time over all threads together."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from compiled_llm.compat.forks import lock


class Stopwatch:
    """A stopwatch that runs while at least one thread is in a ``running`` block; time that several are counts once."""

    def __init__(self) -> None:
        self._lock = lock()
        self._running = self._paused = 0
        self._seconds = self._since = 0.0

    @property
    def seconds(self) -> float:
        """The time until now."""
        self._change()
        return self._seconds

    @contextmanager
    def running(self) -> Iterator[None]:
        self._change(running=1)
        try:
            yield
        finally:
            self._change(running=-1)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop it for the block, whatever other threads do."""
        self._change(paused=1)
        try:
            yield
        finally:
            self._change(paused=-1)

    def _change(self, running: int = 0, paused: int = 0) -> None:
        with self._lock:
            now = time.perf_counter()
            if self._running and not self._paused:
                self._seconds += now - self._since
            self._since = now
            self._running += running
            self._paused += paused
