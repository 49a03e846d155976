"""A gate at which compiling waits."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from compiled_llm.compilation.backend import Inductor


class Gate:
    """Lets compiling begin once it is open, in all threads or in those of a name, and fail with ``error``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, thread: str | None = None) -> None:
        self.reached, self.opened, self.times = threading.Event(), threading.Event(), 0
        self.error: Exception | None = None
        compiling = Inductor.__call__

        def wait(backend: Inductor, *graph: Any) -> Any:
            if thread in (None, threading.current_thread().name):
                self.times += 1
                self.reached.set()
                assert self.opened.wait(60)
                if self.error is not None:
                    raise self.error
            return compiling(backend, *graph)

        monkeypatch.setattr(Inductor, "__call__", wait)
