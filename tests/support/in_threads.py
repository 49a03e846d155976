"""Calls in threads of their own, and how long they may take."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

PATIENCE = 120.0
"""Seconds after which something counts as deadlocked."""


def start(function: Callable[[], Any]) -> Future[Any]:
    """Run in a fresh thread, a daemon so that a deadlock fails one test and not the process."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def in_thread(function: Callable[[], Any], patience: float = PATIENCE) -> Any:
    return start(function).result(timeout=patience)
