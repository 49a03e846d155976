"""Calls of ``generate`` that run in an engine's batch, and leave it before the engine stops."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from compiled_llm.engine.steps.request import Request
from compiled_llm.execution.threads.interrupts import check
from compiled_llm.requests.handle import RequestHandle

_LOOKING = 0.02
"""Seconds between two looks which calls run."""


class JoinedCalls:
    """The calls in an engine's batch; a call that has left it runs by itself."""

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._handles: set[RequestHandle] = set()
        self._barring = 0

    @property
    def barred(self) -> bool:
        return self._barring > 0

    @contextmanager
    def joined(self, handle: RequestHandle) -> Iterator[bool]:
        """Have a call join for the block; yields whether it may."""
        with self._changed:
            if may := not self.barred:
                self._handles.add(handle)
        try:
            yield may
        finally:
            with self._changed:
                self._handles.discard(handle)
                self._changed.notify_all()

    @contextmanager
    def left(self) -> Iterator[None]:
        """Run the block once no call needs the engine, and let none join: those that run end, others leave at once."""
        with self._changed:
            self._barring += 1
        try:
            self._wait()
            yield
        finally:
            with self._changed:
                self._barring -= 1

    def _wait(self) -> None:
        with self._changed:
            while running := [handle for handle in self._handles if not handle.done]:
                for handle in running:
                    if any(map(_waits, handle.requests)):  # for pages, say, that this thread may have
                        handle.cancel()
                self._changed.wait(_LOOKING)
                check()

    def end(self) -> None:
        """Let none join any more; the engine ends those that have, which then run by themselves."""
        with self._changed:
            self._barring += 1


def _waits(request: Request) -> bool:
    return not request.done and request.row is None and len(request.tokens) < request.max_tokens - 1
