"""Messages for whoever runs the loop, from any thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from compiled_llm.compat.condition import Condition

if TYPE_CHECKING:
    from compiled_llm.engine.steps.loop import Loop

Message = Callable[["Loop"], None]

_PATIENCE = 10
"""Seconds: the garbage collector may close an arrivals queue in the very thread that is about to wait."""


class Arrivals:
    """What is to be done between two steps. It knows of no engine, so that one may be forgotten while a thread waits.

    Attributes:
        changed: the lock of the engine's state, notified when something has changed.
        closed: whether nothing comes any more.
    """

    def __init__(self) -> None:
        """Begin empty."""
        self.changed = Condition()
        self.closed = self._called = False
        self._messages: deque[Message] = deque()

    def __bool__(self) -> bool:
        """Whether there are messages."""
        return bool(self._messages)

    def send(self, message: Message) -> None:
        """Leave a message.

        Raises:
            RuntimeError: nobody will take it.
        """
        with self.changed:
            if self.closed:
                raise RuntimeError("the engine is closed; make another one")
            self._messages.append(message)
            self.call()

    def deliver(self, loop: Loop) -> None:
        """Do what the messages say.

        One that is being done still counts as there: else the engine's thread would take the engine for idle before
        the scheduler has its requests, and sleep.
        """
        while self._messages:
            message = self._messages[0]
            try:
                message(loop)
            finally:
                self._messages.popleft()

    def clear(self) -> None:
        """Forget all messages."""
        self._messages.clear()

    def call(self) -> None:
        """End the ``wait`` of whoever serves."""
        with self.changed:
            self._called = True
            self.changed.notify_all()

    def wait(self) -> bool:
        """Wait until somebody has called since the last time; whether there may be something to do.

        Others may have taken the message meanwhile, and leave what it was about when their own answers have ended.
        """
        with self.changed:
            while not (self._called or self.closed):
                self.changed.wait(_PATIENCE)
            self._called = False
            return not self.closed

    def close(self) -> None:
        """Take no more messages."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
