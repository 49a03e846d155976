"""Requests that wait while nothing comes for any of them: whoever answers them stands still."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


class Silence:
    """How long nothing has come; it may last only so long while a request waits.

    One request alone may wait longer: where more arrive than are answered, they queue.

    Attributes:
        heard: when something came, or was asked for, last; whoever receives something says so here.
    """

    def __init__(self, patience: float) -> None:
        """Begin.

        Args:
            patience: seconds that it may last.
        """
        self.heard = time.perf_counter()
        self._patience = patience
        self._waiting = 0

    async def broken_by(self, answer: Awaitable[T]) -> T:
        """Ask now, and return the answer; something has to come until then."""
        self.heard = time.perf_counter()
        self._waiting += 1
        try:
            return await answer
        finally:
            self._waiting -= 1

    async def watched(self, answers: Awaitable[T]) -> T:
        """Return all answers.

        Raises:
            RuntimeError: requests wait, and nothing has come for too long; they are cancelled.
        """
        work = asyncio.ensure_future(answers)
        while not work.done():
            await asyncio.wait({work}, timeout=self._patience / 4)
            if not work.done() and self._is_too_long():
                waiting = self._waiting
                work.cancel()
                with suppress(asyncio.CancelledError):
                    await work
                raise RuntimeError(
                    f"nothing has come for {self._patience:g} s, and {waiting} requests wait; "
                    "--patience gives a slow machine more time"
                )
        return work.result()

    def _is_too_long(self) -> bool:
        return self._waiting > 0 and time.perf_counter() - self.heard > self._patience
