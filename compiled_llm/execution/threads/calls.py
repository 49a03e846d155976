"""Counts calls of ``generate`` and ``forward`` in progress: a change of the model waits until they have ended."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from compiled_llm.compat.condition import Condition
from compiled_llm.execution.threads.interrupts import check

_PATIENCE = 0.2
"""Seconds after which a thread that waits checks for Ctrl-C, and whether a call has moved."""
_STALLED = 1.0
"""Seconds without a step of a call in progress after which waiting calls begin: it may wait for one of them."""


class Calls:
    """The calls of a model in progress, nested ones included; safe to use from any thread."""

    # ``moves`` is counted up by a call in progress that has done a step: it does not wait for a later call.

    def __init__(self) -> None:
        self._changed = Condition()
        self._running: dict[object, int] = {}  # each with its thread
        self.moves = self._waiting = self._barring = 0
        self._let_in = -math.inf  # calls that have waited since before that, on ``time.monotonic``'s clock, may begin

    @property
    def here(self) -> bool:
        """Whether this thread has a call in progress, which is in a callback of its user."""
        return threading.get_ident() in list(self._running.values())

    @property
    def awaited(self) -> bool:
        """Whether a thread waits for the calls to end."""
        return self._waiting > 0

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Be a call in progress for the block; one that comes while calls are awaited begins after those."""
        # A nested one begins at once; and so do all once none of those in progress moves, since a callback may wait for
        # a call of another thread.
        call = object()
        try:
            with self._changed:
                if not self.here:
                    self._wait_for_turn()
                self._running[call] = threading.get_ident()
            yield
        finally:
            with self._changed:
                if self._running.pop(call, None) is not None:  # else Ctrl-C has come while it waited
                    self.moves += 1
                    self._changed.notify_all()

    def _wait_for_turn(self) -> None:
        moves, since = self.moves, time.monotonic()
        came = since
        while self._barring or (self._waiting and came > self._let_in):
            self._changed.wait(_PATIENCE)
            check()
            now = time.monotonic()
            if moves != self.moves:
                moves, since = self.moves, now
            elif now - since > _STALLED:
                self._let_in = now
                self._changed.notify_all()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Await calls in progress in the block; calls that come meanwhile begin after it."""
        with self._changed:
            self._waiting += 1
        try:
            yield
        finally:
            with self._changed:
                self._waiting -= 1
                self._changed.notify_all()

    def wait(self) -> None:
        with self._changed:
            while self._running:
                self._changed.wait(_PATIENCE)
                check()

    @contextmanager
    def barred(self) -> Iterator[bool]:
        """Let no call begin during the block, unless one is in progress already; yields whether none is."""
        with self._changed:
            none = not self._running
            self._barring += none
        try:
            yield none
        finally:
            with self._changed:
                self._barring -= none
                self._changed.notify_all()
