"""An engine's own thread, which runs the loop while there are requests. It keeps no engine alive that nobody holds."""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

from compiled_llm.engine.inbox import Inbox


class Served(Protocol):
    """What runs the loop."""

    def serve(self) -> None:
        """Run it until no request is left."""


def serving_thread(served: Served, inbox: Inbox) -> threading.Thread:
    """Return a thread, not started yet, that serves whenever there are messages; it ends with what it serves."""
    arguments = weakref.ref(served), inbox
    return threading.Thread(target=_serve, args=arguments, name="compiled_llm engine", daemon=True)


def _serve(reference: weakref.ref[Served], inbox: Inbox) -> None:
    while inbox.wait():
        if (served := reference()) is None:
            return
        served.serve()
        del served
