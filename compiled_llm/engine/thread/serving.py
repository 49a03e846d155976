"""An engine's own thread, which runs the loop while there are requests, and does not keep the engine alive."""

from __future__ import annotations

import functools
import threading
import weakref
from typing import Any

from compiled_llm.compat.contexts import callers_context
from compiled_llm.engine.thread.arrivals import Arrivals


class ServingThread:
    """A thread that has an engine ``serve`` whenever there are messages, and ``fail`` of what that raises."""

    def __init__(self, engine_thread: Any, arrivals: Arrivals) -> None:
        self._arguments = weakref.ref(engine_thread), arrivals
        self.thread: threading.Thread | None = None  # None before the first start

    @property
    def here(self) -> bool:
        return threading.current_thread() is self.thread

    def start(self) -> None:
        """Start the thread, unless it runs; one that has died is replaced."""
        if self.thread is None or not self.thread.is_alive():
            serve = functools.partial(callers_context().run, _serve, *self._arguments)
            self.thread = threading.Thread(target=serve, name="compiled_llm engine", daemon=True)
            self.thread.start()

    def join(self) -> None:
        """Wait for its end, which has been asked for."""
        if not (self.thread is None or self.here):
            self.thread.join()


def _serve(reference: weakref.ref[Any], arrivals: Arrivals) -> None:
    while reference() is not None and not arrivals.closed:
        _serve_once(reference, arrivals)


def _serve_once(reference: weakref.ref[Any], arrivals: Arrivals) -> None:
    try:
        if arrivals.wait() and (served := reference()) is not None:
            served.serve()
    except BaseException as error:
        if (served := reference()) is not None:
            served.fail(error)
