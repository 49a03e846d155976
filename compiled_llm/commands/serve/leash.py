"""A process that ends with the one that has started it, however that one ends."""

from __future__ import annotations

import os
import signal
import sys
import threading


def end_with_parent() -> None:
    """Have this process told to end (SIGTERM) once the process at the other end of its standard input has gone."""
    threading.Thread(target=_wait, name="compiled_llm leash", daemon=True).start()


def _wait() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
