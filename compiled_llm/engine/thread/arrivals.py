"""Messages to the thread that runs the loop, from any thread."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from compiled_llm.compat.condition import Condition

if TYPE_CHECKING:
    from compiled_llm.engine.steps.loop import Loop

Message = Callable[["Loop"], None]

_PATIENCE = 10
"""Seconds: the garbage collector may close an arrivals queue in the very thread that is about to wait."""


class Changed(Condition):
    """The lock of an engine's state; ``seen``: the loop's thread has looked since the last ``notify_all``."""

    seen = False

    def wait_before(self, due: float) -> None:
        """Wait until something changes, or ``due``, on the clock of ``time.perf_counter``."""
        with self:
            if self.seen and (left := due - time.perf_counter()) > 0:
                self.wait(left)

    def notify_all(self) -> None:
        self.seen = False
        super().notify_all()


class Arrivals:
    """The calls to make between two steps. They do not keep the engine alive while a thread waits for them."""

    def __init__(self) -> None:
        self.changed = Changed()
        self.closed = self._called = False
        self.messages: deque[Message] = deque()

    def __bool__(self) -> bool:
        return bool(self.messages)

    def send(self, message: Message) -> None:
        """Leave a message; RuntimeError if the engine is closed."""
        with self.changed:
            if self.closed:
                raise RuntimeError("the engine is closed; make another one")
            self.messages.append(message)
            self.call()

    def deliver(self, loop: Loop) -> None:
        """Call all messages."""
        # A message stays in the queue while it is called: else the engine's thread would take the engine for idle
        # before the scheduler has its requests, and sleep.
        while self.messages:
            message = self.messages[0]
            try:
                message(loop)
            finally:
                self.messages.popleft()

    def clear(self) -> None:
        self.messages.clear()

    def call(self) -> None:
        """End the ``wait`` of the engine's thread."""
        with self.changed:
            self._called = True
            self.changed.notify_all()

    def wait(self) -> bool:
        """Wait for a ``call`` since the last time; False once it is closed."""
        # Another thread may have taken the message meanwhile, and leave its requests when its own answers have ended.
        with self.changed:
            while not (self._called or self.closed):
                self.changed.wait(_PATIENCE)
            self._called = False
            return not self.closed

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()
