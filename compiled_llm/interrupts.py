"""Ctrl-C that does not tear bookkeeping apart.

Python raises KeyboardInterrupt between any two instructions of the main thread, in a ``finally`` as well. Inside
``held`` it waits until a block that is ``allowed`` to be interrupted, which is all that takes long, or until the end.
Handlers of the user's own are left alone.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class _State:
    """The main thread's; no other is interrupted."""

    allowed = True
    pending = False


@contextmanager
def held() -> Iterator[None]:
    """Hold Ctrl-C back for the block, except where it is ``allowed``."""
    if not _is_ours_to_hold():
        yield
        return
    before = _State.allowed
    _State.allowed = False
    outermost = not _is_installed()
    if outermost:
        signal.signal(signal.SIGINT, _on_interrupt)
    try:
        yield
    finally:
        _State.allowed = before
        if outermost:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if before:
            check()


@contextmanager
def allowed() -> Iterator[None]:
    """Let Ctrl-C through for the block, inside ``held``."""
    if _State.allowed or not _is_main_thread():
        yield
        return
    check()
    try:
        _State.allowed = True
        yield
    finally:
        _State.allowed = False


def check() -> None:
    """Raise KeyboardInterrupt if one was held back from this thread."""
    if _State.pending and _is_main_thread():
        _State.pending = False
        raise KeyboardInterrupt


def _on_interrupt(signum: int, frame: FrameType | None) -> None:
    if _State.allowed:
        raise KeyboardInterrupt
    _State.pending = True


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _is_installed() -> bool:
    return signal.getsignal(signal.SIGINT) is _on_interrupt


def _is_ours_to_hold() -> bool:
    return _is_main_thread() and (_is_installed() or signal.getsignal(signal.SIGINT) is signal.default_int_handler)
