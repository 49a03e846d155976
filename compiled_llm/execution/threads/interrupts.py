"""Ctrl-C that does not tear bookkeeping apart.

Python raises KeyboardInterrupt between any two instructions of the main thread, in a ``finally`` as well. Inside
``held`` it waits until a block that is ``allowed`` to be interrupted, which is all that takes long, or until the end.
Handlers of the user's own are left alone. A device thread is interrupted by the main one, which waits while that holds.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ContextDecorator, contextmanager
from types import FrameType
from typing import Any


class _State:
    """The main thread's."""

    allowed = True
    pending = False
    handles = False
    """Whether ``held`` has put its handler in the place of Python's own."""


class _Workers(threading.local):
    """What a thread of ours has while it must not be interrupted."""

    guard: threading.RLock | None = None


_workers = _Workers()


def guarded_by(guard: threading.RLock) -> None:
    """Let this thread take ``guard`` inside ``held``; whoever interrupts it takes it first."""
    _workers.guard = guard


class held(ContextDecorator):  # noqa: N801
    """Hold Ctrl-C back for the block, except where it is ``allowed``."""

    _holding: AbstractContextManager[None] | None = None

    def __enter__(self) -> None:
        if _workers.guard is not None:
            self._holding = _guarded(_workers.guard)
        elif _State.allowed and _is_ours_to_hold():  # inside ``held`` there is nothing left to do
            self._holding = _held()
        if self._holding is not None:
            self._holding.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._holding is not None:
            self._holding.__exit__(*error)

    def _recreate_cm(self) -> held:
        return held()


@contextmanager
def _guarded(guard: threading.RLock) -> Iterator[None]:
    with guard:
        _arrive()
        yield


@contextmanager
def _held() -> Iterator[None]:
    before, outermost = _State.allowed, not _State.handles
    try:
        _State.allowed = False
        if outermost:
            signal.signal(signal.SIGINT, _on_interrupt)
            _State.handles = True
        yield
    finally:
        try:
            if outermost:
                _State.handles = False
                signal.signal(signal.SIGINT, signal.default_int_handler)
        finally:
            _State.allowed = before
        if before:
            check()


class allowed:  # noqa: N801
    """Let Ctrl-C through for the block, inside ``held``.

    The innermost context, and never around the ``yield`` of another: a generator that was interrupted at its ``yield``
    is closed when somebody drops the traceback, and would undo then what has long been undone.
    """

    _changed = False

    def __enter__(self) -> None:
        if _State.allowed or not _is_main_thread():
            return
        _State.allowed = True
        if _State.pending:  # looked at last: what comes after this line is not held back any more
            _State.allowed = False
            check()
        self._changed = True

    def __exit__(self, *_: object) -> None:
        if self._changed:
            _State.allowed = False


def check() -> None:
    """Raise KeyboardInterrupt if one was held back from this thread."""
    if _State.pending and _is_main_thread():
        _State.pending = False
        raise KeyboardInterrupt


def _arrive() -> None:
    """Do nothing: an interrupt that was sent just before arrives at the latest when a function is entered."""


def _on_interrupt(signum: int, frame: FrameType | None) -> None:
    if _State.allowed:
        _State.allowed = False  # the next would hit what this one unwinds
        raise KeyboardInterrupt
    _State.pending = True


def _is_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident


def _is_ours_to_hold() -> bool:
    # What is inside ``held`` asks without a look at the handler, which takes as long as all the rest.
    return _is_main_thread() and (_State.handles or signal.getsignal(signal.SIGINT) is signal.default_int_handler)
