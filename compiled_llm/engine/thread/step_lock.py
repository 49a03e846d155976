"""Lets one thread at a time run an engine's loop, and none while another thread has paused it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from compiled_llm.execution.threads.interrupts import check, deferred
from compiled_llm.requests.awaited_code import say_what_holds

_PATIENCE = 0.2
"""Seconds after which a thread that waits looks whether Ctrl-C has been pressed."""


class StepLock:
    """A lock that the thread holds which runs the loop, or has paused it."""

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._runner: threading.Thread | None = None
        self.pausing = 0  # how many threads wait to pause it; the one that runs it lets go soon
        self.resting = False  # no thread may run it until it is allowed again; it can be paused

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
        """Whether no thread has the loop; a thread that has ended does not."""
        return self._runner is None or not self._runner.is_alive()

    def begin(self, done: Callable[[], bool]) -> bool:
        """Wait until no other thread runs the loop, or ``done``; True if this one does now; RuntimeError if it did."""
        with self._changed:
            self.check_elsewhere()
            self.wait_until(lambda: done() or (self._free and not (self.pausing or self.resting)))
            return not done() and self._take()

    def begin_if_free(self) -> bool:
        """Run the loop in this thread if no other does; True if this thread runs it now."""
        with self._changed:
            return self._free and self._take()

    @deferred()
    def pause(self, patience: float = math.inf) -> bool:
        """Let no other thread run the loop; True if this thread has it, False after ``patience`` seconds."""
        # RuntimeError if this thread runs it.
        with self._changed:
            self.check_elsewhere()
            self.pausing += 1
            self._changed.notify_all()
            until = time.monotonic() + patience
            try:
                self.wait_until(lambda: self._free or time.monotonic() > until)
                return self._free and self._take()
            finally:
                self.pausing -= 1
                self._changed.notify_all()

    def leave(self) -> None:
        with self._changed:
            self._runner = None
            self._changed.notify_all()

    def wait_until(self, ready: Callable[[], object]) -> None:
        """Wait, releasing the lock of the engine's state meanwhile."""
        while not ready():
            self._changed.wait(_PATIENCE)
            check()
            self._say_what_holds()

    def _take(self) -> bool:
        self._runner = threading.current_thread()
        return True

    def check_elsewhere(self) -> None:
        """Raise RuntimeError if this thread runs the loop or has paused it, and so may not wait for it."""
        if self.here:
            raise RuntimeError("the engine is paused, or running, in this thread; call this from outside of it")
        self._say_what_holds()

    def _say_what_holds(self) -> None:
        """Say that the loop, for which this thread waits, has waited for the user's code for long."""
        runner = self._runner
        say_what_holds(None if runner is None else runner.ident)
