"""What long requests have taken goes back to the system: the C library keeps it for others, which may never come."""

from __future__ import annotations

import asyncio
import ctypes
from typing import Any

_SECONDS = 0.5
"""After a long piece of work, so that what it has left is free by then; at most once in that time."""


class Memory:
    """Gives back what is free, now and then."""

    def __init__(self) -> None:
        """Find how, if the C library can do it: glibc's can."""
        self._trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._due = 0.0

    def give_back_soon(self) -> None:
        """Give back what will be free soon, beside this event loop."""
        loop = asyncio.get_running_loop()
        if self._trim is not None and loop.time() >= self._due:
            self._due = loop.time() + _SECONDS
            loop.call_later(_SECONDS, loop.run_in_executor, None, self._trim, 0)
