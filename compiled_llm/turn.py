"""Whose loop runs: concurrent ones would push each other out of the decode buffers, so they queue."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Turn:
    """A lock that a loop gives away while a callback of the user's runs, since that may call the model itself."""

    def __init__(self) -> None:
        """Start free."""
        self._condition = threading.Condition()
        self._taken = False
        self._loops = 0
        self._callbacks = threading.local()

    @contextmanager
    def taken(self, fits: Callable[[], bool]) -> Iterator[None]:
        """Wait for the turn and hold it.

        Args:
            fits: whether there are pages enough; if not, loops in progress are waited for, except from inside one of
                their callbacks, which they wait for.
        """
        nested = getattr(self._callbacks, "depth", 0) > 0
        with self._condition:
            self._condition.wait_for(lambda: not self._taken and (nested or self._loops == 0 or fits()))
            self._taken = True
            self._loops += 1
        try:
            yield
        finally:
            with self._condition:
                self._taken = False
                self._loops -= 1
                self._condition.notify_all()

    @contextmanager
    def yielded(self) -> Iterator[None]:
        """Let others have the turn while the block runs."""
        self._callbacks.depth = getattr(self._callbacks, "depth", 0) + 1
        with self._condition:
            self._taken = False
            self._condition.notify_all()
        try:
            yield
        finally:
            self._callbacks.depth -= 1
            with self._condition:
                self._condition.wait_for(lambda: not self._taken)
                self._taken = True
