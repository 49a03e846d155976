"""Which thread runs an engine's loop: one at a time, and none while another has paused it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from compiled_llm.execution.threads.interrupts import check, deferred

_PATIENCE = 0.2
"""Seconds after which a thread that waits looks whether Ctrl-C has been pressed."""


class StepLock:
    """Gives one thread at a time the loop.

    Attributes:
        pausing: how many threads want nobody to run it; whoever does lets go soon.
        resting: whether nobody runs it until it is allowed again; it can be paused.
    """

    def __init__(self, changed: threading.Condition) -> None:
        """Begin with nobody.

        Args:
            changed: the lock of the engine's state, notified when something has changed.
        """
        self._changed = changed
        self._runner: threading.Thread | None = None
        self.pausing = 0
        self.resting = False

    @property
    def here(self) -> bool:
        """Whether this thread runs the loop, or has paused it."""
        return self._runner is threading.current_thread()

    @property
    def elsewhere(self) -> bool:
        """Whether another thread runs the loop, or has paused it."""
        return not (self._free or self.here)

    @property
    def _free(self) -> bool:
        """Whether no thread has the loop; one that has ended has it no more, whatever it has left open."""
        return self._runner is None or not self._runner.is_alive()

    def begin(self, done: Callable[[], bool]) -> bool:
        """Wait until no other thread runs the loop, or until ``done``; whether this one does now.

        Raises:
            RuntimeError: this thread runs it already, or has paused it.
        """
        with self._changed:
            self.check_elsewhere()
            self.wait_until(lambda: done() or (self._free and not (self.pausing or self.resting)))
            return not done() and self._take()

    def begin_if_free(self) -> bool:
        """Run the loop in this thread unless somebody does; whether it does now."""
        with self._changed:
            return self._free and self._take()

    @deferred()
    def pause(self, patience: float = math.inf) -> bool:
        """Let no other thread run the loop from now on; whether this thread has it.

        Args:
            patience: seconds after which this thread gives up, if another one still has the loop.

        Raises:
            RuntimeError: this thread runs it.
        """
        with self._changed:
            self.check_elsewhere()
            self.pausing += 1
            until = time.monotonic() + patience
            try:
                self.wait_until(lambda: self._free or time.monotonic() > until)
                return self._free and self._take()
            finally:
                self.pausing -= 1
                self._changed.notify_all()

    def leave(self) -> None:
        """Let others run it."""
        with self._changed:
            self._runner = None
            self._changed.notify_all()

    def wait_until(self, ready: Callable[[], object]) -> None:
        """Wait, with the lock of the engine's state, which others may have meanwhile."""
        while not ready():
            self._changed.wait(_PATIENCE)
            check()

    def _take(self) -> bool:
        self._runner = threading.current_thread()
        return True

    def check_elsewhere(self) -> None:
        """Check that this thread may wait for the loop.

        Raises:
            RuntimeError: it runs it, or has paused it.
        """
        if self.here:
            raise RuntimeError("the engine is paused, or running, in this thread; call this from outside of it")
