"""How often a process that dies may be started again."""

from __future__ import annotations

import time
from collections import deque

_HOUR = 3600.0


class Restarts:
    """A count of the restarts of the last hour, of which there may be ``max_restarts``."""

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self._times: deque[float] = deque(maxlen=max_restarts)

    def may(self) -> bool:
        """Whether there may be another one now; if so, it counts."""
        now = time.monotonic()
        if len(self._times) == self._max_restarts and (not self._times or now - self._times[0] < _HOUR):
            return False
        self._times.append(now)
        return True
