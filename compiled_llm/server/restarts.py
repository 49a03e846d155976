"""How often a process that dies may be started again."""

from __future__ import annotations

import time
from collections import deque

_HOUR = 3600.0


class Restarts:
    """Counts restarts of the last hour."""

    def __init__(self, most: int) -> None:
        """Begin with none.

        Args:
            most: in an hour.
        """
        self._most = most
        self._times: deque[float] = deque(maxlen=most)

    def may(self) -> bool:
        """Whether there may be another one now; it counts."""
        now = time.monotonic()
        if len(self._times) == self._most and (not self._times or now - self._times[0] < _HOUR):
            return False
        self._times.append(now)
        return True
