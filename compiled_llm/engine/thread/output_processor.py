"""A thread of the engine that makes text of tokens and finds stop strings, while the loop's thread goes on."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Iterable, Sequence

from compiled_llm.compat.condition import Condition
from compiled_llm.engine.steps.request import RequestError
from compiled_llm.engine.thread.arrivals import Arrivals
from compiled_llm.requests.handle import RequestHandle
from compiled_llm.requests.listeners import tell
from compiled_llm.requests.users_code import described

logger = logging.getLogger("compiled_llm.engine")

_AT_ONCE = 16
"""Requests whose text is made before the loop's thread, which may wait for the GIL, gets a chance to go on."""
_PATIENCE = 10
"""Seconds: the garbage collector may close it in the very thread that is about to wait."""


class OutputProcessor:
    """The maker of text for requests that are read as text, or that stop strings end."""

    # The loop hands over changed requests once a step; listeners of requests without text hear at once. The thread
    # starts with the first request that has text.

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals
        self._work = _Work()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._work.close).atexit = False

    def read(self, handles: Iterable[RequestHandle]) -> None:
        """Make the text of the tokens that have come, and tell of it; in this thread, if the engine is closed."""
        if not self._work.add(handles):
            _read(handles, self._arrivals)
        elif not self._runs:
            self._start()

    @property
    def _runs(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _start(self) -> None:
        with self._work.changed:
            if not self._runs:
                arguments = self._work, self._arrivals
                self._thread = threading.Thread(target=_serve, args=arguments, name="compiled_llm output", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Make the text of what has come, and end the thread."""
        self._work.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()


class _Work:
    """Requests whose tokens have not been read. It has no reference to the engine, which may so be collected."""

    def __init__(self) -> None:
        self.changed = Condition()
        self._handles: dict[RequestHandle, None] = {}
        self._taken: list[RequestHandle] = []
        self._closed = False

    @property
    def finished(self) -> bool:
        return self._closed and not self._handles

    def add(self, handles: Iterable[RequestHandle]) -> bool:
        with self.changed:
            if not self._closed:
                self._handles.update(dict.fromkeys(handles))
                self.changed.notify()
            return not self._closed

    def take(self) -> list[RequestHandle]:
        """Wait for work; nothing if there will be none."""
        with self.changed:
            self._taken = []  # the last reference to an engine may go here
            while not (self._handles or self._closed):
                self.changed.wait(_PATIENCE)
            self._taken, self._handles = list(self._handles), {}
            return self._taken

    def take_all(self) -> list[RequestHandle]:
        """Return all requests that waited or were taken."""
        with self.changed:
            lost = list(dict.fromkeys([*self._taken, *self._handles]))  # one that was taken may wait again
            self._handles, self._taken = {}, []
            return lost

    def close(self) -> None:
        with self.changed:
            self._closed = True
            self.changed.notify_all()


def _serve(work: _Work, arrivals: Arrivals) -> None:
    while not work.finished:
        try:
            _read(work.take(), arrivals)
        except BaseException as error:  # no request's: what a tokenizer or a listener raises has been dealt with
            _lose(work, arrivals, error)


def _lose(work: _Work, arrivals: Arrivals, error: BaseException) -> None:
    """End the requests whose text was being made, or waited for that; the thread goes on with others."""
    lost = work.take_all()
    logger.error("compiled_llm: requests whose text is lost: %d, of %s", len(lost), described(error), exc_info=error)
    failure = RequestError(f"the thread that makes text has failed: {described(error)}")
    for handle in lost:
        handle.lose_text(failure)
    _notify(lost, arrivals)


def _read(handles: Iterable[RequestHandle], arrivals: Arrivals) -> None:
    notified: list[RequestHandle] = []
    for number, handle in enumerate(handles, start=1):
        handle.read_text()
        notified.append(handle)
        if number % _AT_ONCE == 0:
            time.sleep(0)
    _notify(notified, arrivals)


def _notify(notified: Sequence[RequestHandle], arrivals: Arrivals) -> None:
    tell([listeners for handle in notified for listeners in handle.awaiting])
    if any(handle.done for handle in notified):
        with arrivals.changed:
            arrivals.changed.notify_all()
