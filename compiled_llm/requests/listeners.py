"""Listeners of one request: threads, event loops, and functions to call."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

from compiled_llm.compat.condition import Condition
from compiled_llm.requests import awaited_code
from compiled_llm.requests.awaited_code import awaited
from compiled_llm.requests.users_code import described, is_interrupt

logger = logging.getLogger("compiled_llm.engine")


class Wakeup:
    """Wakes a task of the running event loop: what ``asyncio.Event`` does for one that waits, in fewer calls."""

    # An engine with hundreds of streams wakes a task for each token, in the process that has to launch the next step.

    __slots__ = ("_future", "_loop", "is_set")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[None] | None = None
        self.is_set = False

    def set(self) -> None:
        self.is_set = True
        future = self._future
        if future is not None and not future.done():  # its task may have been cancelled
            future.set_result(None)

    def wait(self) -> asyncio.Future[None]:
        """Return what its task awaits; one task at a time."""
        self._future = future = self._loop.create_future()
        if self.is_set:
            future.set_result(None)
        return future


Task = tuple[asyncio.AbstractEventLoop, Wakeup]  # an event loop, and what wakes a task of it


class Listeners:
    """Waiting threads and event loops, woken when something has changed.

    Attributes:
        audience: another object after each change of who listens, to any request of this process; whoever remembers who
            listens to what compares it.
    """

    audience: ClassVar[object] = object()

    def __init__(
        self, check: Callable[[], None] = lambda: None, check_process: Callable[[], None] = lambda: None
    ) -> None:
        """``check`` raises in a thread that must not wait, ``check_process`` in a process in which nothing changes."""
        # ``check`` is called again now and then while a thread waits, to say what holds it.
        self._check = check
        self.check_process = check_process
        self._changed = Condition()
        self.threads = 0  # these three are for ``tell`` to read
        self.functions: set[Callable[[], object]] = set()
        self.tasks: set[Task] = set()
        self.count = 0  # how many wait; in a step of many requests it is 0 for most
        self.used = False  # whether any has ever waited

    def add(self, function: Callable[[], object]) -> None:
        """Call ``function`` whenever something has changed, once for all requests that a step has changed."""
        self.check_process()
        with self._changing():
            self.functions.add(function)

    def wait_until(self, ready: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait in this thread, ``timeout`` seconds at most; return whether it is ``ready``."""
        if not ready():
            self.check_process()
            self._check()
        with self._changed:
            # A thread that does not see this has changed everything before, and ``ready`` is called now.
            with self._changing():
                self.threads += 1
            try:
                return self._wait_for(ready, math.inf if timeout is None else timeout)
            finally:
                with self._changing():
                    self.threads -= 1

    def _wait_for(self, ready: Callable[[], bool], seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not (found := self._changed.wait_for(ready, min(awaited_code.LONG, seconds))) and seconds > 0:
            seconds = until - time.monotonic()
            self._check()
        return found

    @contextmanager
    def listening(self, wakeup: Wakeup | None = None) -> Iterator[Wakeup]:
        """Yield what is set in the running event loop whenever something has changed; a new one if None."""
        self.check_process()
        wakeup = Wakeup() if wakeup is None else wakeup
        task = asyncio.get_running_loop(), wakeup
        with self._changing():
            self.tasks.add(task)
        try:
            yield wakeup
        finally:
            self.forget([task])

    def forget(self, tasks: Iterable[Task]) -> None:
        with self._changing():
            self.tasks.difference_update(tasks)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        with self._changed:
            yield
            self.count = self.threads + len(self.functions) + len(self.tasks)
            self.used = self.used or self.count > 0
            self.change_audience()

    @staticmethod
    def change_audience() -> None:
        """Note that somebody begins to listen, or ends; afterwards, so that who looks then finds it."""
        Listeners.audience = object()

    def remove(self, function: Callable[[], object]) -> None:
        with self._changing():
            self.functions.discard(function)

    def wake_threads(self) -> None:
        with self._changed:
            self._changed.notify_all()


def tell(several: Sequence[Listeners]) -> None:
    """Notify the listeners of several requests: each function and event loop once, however many it waits for."""
    functions: set[Callable[[], object]] = set()
    tasks: list[Task] = []
    for listeners in several:  # of which there are many in each step: no calls for what most lack
        if listeners.tasks:
            tasks += listeners.tasks
        if listeners.functions:
            functions |= listeners.functions
        if listeners.threads:
            listeners.wake_threads()
    try:
        if functions:
            _call_all(several, list(functions))
    finally:  # Ctrl-C in one of them leaves no task waiting
        if tasks:
            _tell_tasks(several, tasks)


def _call_all(several: Sequence[Listeners], functions: list[Callable[[], object]]) -> None:
    """Call functions; one that fails fails no request, and Ctrl-C in one of them is raised after the others."""
    while functions:
        function = functions.pop()
        try:
            with awaited("listener", function):
                function()
        except BaseException as error:
            if is_interrupt(error):
                _call_all(several, functions)
                raise
            logger.warning("compiled_llm: a listener has failed, and hears no more: %s", described(error))
            for listeners in several:
                listeners.remove(function)


def _tell_tasks(several: Iterable[Listeners], tasks: Sequence[Task]) -> None:
    here, elsewhere = running_loop(), dict[asyncio.AbstractEventLoop, list[Task]]()
    for task in tasks:
        if task[0] is here:
            task[1].set()
        else:
            elsewhere.setdefault(task[0], []).append(task)
    for loop, waiting in elsewhere.items():
        try:
            loop.call_soon_threadsafe(_wake, waiting)
        except Exception:  # the loop was closed meanwhile; no task waits there any more
            for listeners in several:
                listeners.forget(waiting)


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop that this thread runs; None if it runs none."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _wake(tasks: Iterable[Task]) -> None:
    for _, wakeup in tasks:
        wakeup.set()
