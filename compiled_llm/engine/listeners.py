"""Who waits for something of one request: threads, event loops, and functions to call."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

logger = logging.getLogger("compiled_llm.engine")


class Listeners:
    """Waits in any thread and any event loop, and is told when something has changed."""

    def __init__(self, check: Callable[[], None] = lambda: None) -> None:
        """Begin with nobody.

        Args:
            check: raises an error in a thread that must not wait.
        """
        self._check = check
        self.forget_other_threads()

    def forget_other_threads(self) -> None:
        """Begin anew; in a forked process another thread may have had the lock."""
        self._changed = threading.Condition()
        self._threads = 0
        self._functions: set[Callable[[], object]] = set()
        self._tasks: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()

    def __bool__(self) -> bool:
        """Whether anybody waits; in each step of many requests nobody does for most."""
        return self._threads > 0 or bool(self._tasks) or bool(self._functions)

    def add(self, function: Callable[[], object]) -> None:
        """Have a function called whenever something has changed."""
        self._functions.add(function)

    def wait_until(self, ready: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait in this thread, ``timeout`` seconds at most; whether it is ``ready``."""
        if not ready():
            self._check()
        with self._changed:
            self._threads += 1  # whoever does not see this has changed everything before, and ``ready`` is asked now
            try:
                return self._changed.wait_for(ready, timeout)
            finally:
                self._threads -= 1

    @contextmanager
    def listening(self) -> Iterator[asyncio.Event]:
        """Yield an event of the running event loop that is set whenever something has changed."""
        event = asyncio.Event()
        task = asyncio.get_running_loop(), event
        self._tasks.add(task)
        try:
            yield event
        finally:
            self._tasks.discard(task)

    def _tell_threads(self) -> None:
        if self._threads:
            with self._changed:
                self._changed.notify_all()
        for function in tuple(self._functions):
            try:
                function()
            except Exception as error:  # that ends nobody's request
                self._functions.discard(function)
                logger.warning("compiled_llm: a listener has failed, and hears no more: %s", error)


def tell(several: Sequence[Listeners]) -> None:
    """Wake whoever waits for one of these; each event loop once, however many of its tasks wait."""
    tasks: defaultdict[asyncio.AbstractEventLoop, list[asyncio.Event]] = defaultdict(list)
    for listeners in several:
        listeners._tell_threads()
        for loop, event in tuple(listeners._tasks):
            tasks[loop].append(event)
    for loop, events in tasks.items():
        try:
            loop.call_soon_threadsafe(_set, events)
        except RuntimeError:  # it was closed in the midst of it; nobody waits there any more
            for listeners in several:
                listeners._tasks -= {(loop, event) for event in events}


def _set(events: Iterable[asyncio.Event]) -> None:
    for event in events:
        event.set()
