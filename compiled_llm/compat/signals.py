"""A signal's handler, as ``signal.getsignal`` and ``signal.signal`` have it, in a tenth of their time."""

# These call the functions of ``_signal``, and look up what they return among constants, which is an exception for any
# function: 13 µs, four times in each call of a model. Ends when they do without. Beside it, how a thread blocks Ctrl-C.

from __future__ import annotations

import importlib
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

Function = Callable[[int, FrameType | None], Any]
Handler = Function | int | None  # a number stands for what the system does, None for a handler that is not Python's

_without_constants: Any = importlib.import_module("_signal")
handler_of: Callable[[int], Handler] = _without_constants.getsignal
set_handler: Callable[[int, Function], Handler] = _without_constants.signal


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Keep SIGINT from this thread for the block, and for good from processes and threads that it starts meanwhile."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
