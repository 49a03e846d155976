"""Memory of long requests goes back to the system: the C library would keep it for others, which may never come."""

from __future__ import annotations

import asyncio
import ctypes
from typing import Any

_SECONDS = 0.5  # after a long piece of work, so that its memory is free by then; at most once in that time


class Memory:
    """A timer that gives free memory back to the system, now and then; only glibc can."""

    def __init__(self) -> None:
        self._trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._due = 0.0

    def give_back_soon(self) -> None:
        """Give back, in another thread, the memory that will be free soon."""
        loop = asyncio.get_running_loop()
        if self._trim is not None and loop.time() >= self._due:
            self._due = loop.time() + _SECONDS
            loop.call_later(_SECONDS, loop.run_in_executor, None, self._trim, 0)
