"""One decoding loop runs at a time: concurrent ones would push each other out of the decode buffers."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from compiled_llm.compat.condition import Condition
from compiled_llm.compat.forks import HomeProcess
from compiled_llm.execution.threads.interrupts import check
from compiled_llm.requests.awaited_code import say_what_holds

_PATIENCE = 0.02
"""Seconds after which a loop that waits goes before one that has just had the lock."""
_STALLED = 1.0
"""Seconds without a step after which any loop that can go does: a callback may wait for a call that came late."""


class _Waiter(NamedTuple):
    """A loop that waits: since when, and whether it could go on if the lock were free and no other had come before."""

    since: float
    ready: Callable[[], bool]
    takes_pages: bool = False


class LoopLock:
    """A lock that a loop gives away while a callback of the user's runs, since that may call the model itself."""

    # Loops that take pages begin in the order in which they came: many small ones starve no large one.

    def __init__(self) -> None:
        self._home = HomeProcess()
        self._condition = Condition()
        self._holder: object | None = None
        self.waiters: list[_Waiter] = []  # the loops that wait for the lock
        self._loops: dict[object, int] = {}  # each with its thread
        self.claims: dict[object, float] = {}  # since when owners keep pages from loops that come later
        self._moved = 0.0  # the time of the last step
        self._local = threading.local()

    @property
    def busy(self) -> bool:
        return bool(self._loops)

    @property
    def here(self) -> bool:
        """Whether this thread has a loop in progress, which is in a callback of its user."""
        return getattr(self._local, "loop", None) is not None

    @property
    def shared(self) -> bool:
        """Whether more than one loop is in progress."""
        return len(self._loops) > 1

    def pages_wanted_since(self, apart_from: object = None) -> float:
        """Return since when a loop, but for ``apart_from``, waits for pages: later ones take none; else ``inf``."""
        # It is of ``time.monotonic``'s clock; and ``inf``, too, if the loops that have the pages seem to wait for a
        # later one.
        if not (self.waiters or self.claims):
            return math.inf
        with self._condition:
            return self._first_taker(apart_from)

    def claim_pages(self, owner: object, since: float | None) -> None:
        """Keep pages from loops that come after ``since``; None ends that."""
        if self.claims.get(owner) == since:
            return
        with self._condition:
            if since is None:
                del self.claims[owner]
                self._condition.notify_all()
            else:
                self.claims[owner] = since

    @contextmanager
    def taken(self, fits: Callable[[], bool] | None = None) -> Iterator[None]:
        """Wait for the lock and hold it; RuntimeError if a loop of this very thread does."""
        # ``fits`` says whether there are enough pages for a loop that takes some; if not, wait for the loops in
        # progress to end. A call from inside one of their callbacks does not: they wait for it.
        outer, mine = getattr(self._local, "loop", None), object()
        with self._condition:
            if outer is not None and self._holder is outer:
                raise RuntimeError(
                    "generate: a step of this model is running in this thread, as where a listener of the engine is "
                    "told of a token; call it from another thread, or afterwards"
                )
            takes_pages = fits is not None and outer is None
            self._wait_until(lambda: bool(not takes_pages or not self._loops or (fits and fits())), takes_pages)
            self._holder = mine
            self._loops[mine] = threading.get_ident()
        self._local.loop = mine
        try:
            yield
        finally:
            self._local.loop = outer
            with self._condition:
                if self._holder is mine:  # False if Ctrl-C came while waiting to get it back
                    self._holder = None
                del self._loops[mine]
                self._condition.notify_all()

    @contextmanager
    def yielded(self) -> Iterator[None]:
        """Give the lock away for the block, in which Ctrl-C may be ``allowed``."""
        mine = self._local.loop
        with self._condition:
            self._holder, self._moved = None, time.monotonic()
            self._condition.notify_all()
        try:
            yield
        finally:
            with self._condition:
                self._wait_until(lambda: True, gone=lambda: mine not in self._loops)
                if mine in self._loops:  # False if only a traceback has kept this open
                    self._holder = mine

    def _wait_until(
        self, ready: Callable[[], bool], takes_pages: bool = False, gone: Callable[[], bool] = lambda: False
    ) -> None:
        """Wait until the lock is free, this loop is ready, and no ready one has waited for long; or it is gone."""
        waiter = _Waiter(time.monotonic(), ready, takes_pages)
        if not self.waiters:  # steps without a waiting thread were not noted
            self._moved = waiter.since
        self.waiters.append(waiter)
        try:
            # In a forked process, to which a callback has returned, the other threads do not exist.
            while not (gone() or self._home.left or (self._holder is None and self._may_go(waiter))):
                self._condition.wait(timeout=0.2)
                check()
                say_what_holds(self._loops.get(self._holder))
        finally:
            self.waiters.remove(waiter)

    def _may_go(self, waiter: _Waiter) -> bool:
        first, late = self._first_taker(), min(waiter.since, time.monotonic() - _PATIENCE)

        def can_go(other: _Waiter) -> bool:
            return not (other.takes_pages and other.since > first) and other.ready()

        return can_go(waiter) and not any(
            other.since < late and can_go(other) for other in self.waiters if other is not waiter
        )

    def _first_taker(self, apart_from: object = None) -> float:
        if time.monotonic() - self._moved > _STALLED:
            return math.inf
        claims = [since for owner, since in self.claims.items() if owner is not apart_from]
        return min([waiter.since for waiter in self.waiters if waiter.takes_pages] + claims, default=math.inf)
