"""The user's code that a step waits for, and who waits for it: if one waits for the other, neither goes on."""

from __future__ import annotations

import logging
import threading
import time
from types import TracebackType

logger = logging.getLogger("compiled_llm.engine")

LONG = 5.0
"""Seconds that a step has waited for the user's code before those who wait for the step say so."""
_awaited: dict[int, awaited] = {}  # by thread
_local = threading.local()


class awaited:  # noqa: N801
    """Note for the block that this thread's step waits for a ``function`` of the user's, and what ``kind`` that is."""

    def __init__(self, kind: str, function: object) -> None:
        self.kind, self.function, self.thread = kind, function, threading.current_thread()
        self.since = time.monotonic()
        self._outer: awaited | None = None

    @property
    def name(self) -> str:
        return f"{self.kind} {getattr(self.function, '__qualname__', type(self.function).__name__)}"

    def __enter__(self) -> None:
        self._outer, _awaited[threading.get_ident()] = _awaited.get(threading.get_ident()), self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._outer is None:
            _awaited.pop(threading.get_ident(), None)
        else:
            _awaited[threading.get_ident()] = self._outer


def say_what_holds(thread: int | None) -> None:
    """Log, once in this thread, that it waits for a step of that one, which has long waited for the user's code."""
    code = None if thread is None else _awaited.get(thread)
    if code is None or (seconds := time.monotonic() - code.since) < LONG:
        return
    said: set[str] = _local.__dict__.setdefault("said", set())
    if code.name in said:
        return
    said.add(code.name)
    here = threading.current_thread().name
    logger.warning(
        "compiled_llm: thread %r waits for a step that runs in thread %r, and that has waited %.0f s for %s to return: "
        "if this waits for thread %r, neither goes on; let it wait for nothing that calls the model",
        *(here, code.thread.name, seconds, code.name, here),
    )
