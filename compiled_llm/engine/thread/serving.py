"""An engine's own thread, which runs the loop while there are requests. It keeps no engine alive that nobody holds."""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

from compiled_llm.engine.thread.arrivals import Arrivals


class ServedLoop(Protocol):
    """What runs the loop."""

    def serve(self) -> None:
        """Run it until no request is left."""

    def fail(self, error: BaseException) -> None:
        """End all requests: this has failed."""


class ServingThread:
    """Serves whenever there are messages, and ends with what it serves; whatever fails there ends requests alone.

    Attributes:
        thread: None before the first start.
    """

    def __init__(self, served: ServedLoop, arrivals: Arrivals) -> None:
        """Begin without a thread.

        Args:
            served: what runs the loop; it is not kept alive.
            inbox: has its messages.
        """
        self._arguments = weakref.ref(served), arrivals
        self.thread: threading.Thread | None = None

    @property
    def here(self) -> bool:
        """Whether this thread is it."""
        return threading.current_thread() is self.thread

    def start(self) -> None:
        """Have the thread run, unless it does; one that has died, whatever it died of, is replaced."""
        if self.thread is None or not self.thread.is_alive():
            self.thread = threading.Thread(target=_serve, args=self._arguments, name="compiled_llm engine", daemon=True)
            self.thread.start()

    def join(self) -> None:
        """Wait for its end, which has been asked for."""
        if not (self.thread is None or self.here):
            self.thread.join()


def _serve(reference: weakref.ref[ServedLoop], arrivals: Arrivals) -> None:
    while reference() is not None and not arrivals.closed:
        _serve_once(reference, arrivals)


def _serve_once(reference: weakref.ref[ServedLoop], arrivals: Arrivals) -> None:
    try:
        if arrivals.wait() and (served := reference()) is not None:
            served.serve()
    except BaseException as error:
        if (served := reference()) is not None:
            served.fail(error)
