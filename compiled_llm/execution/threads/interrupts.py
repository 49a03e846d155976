"""Defers Ctrl-C while internal state is inconsistent."""

# Python raises KeyboardInterrupt between any two instructions of the main thread, in a ``finally`` as well. Inside
# ``deferred`` it waits until a block that is ``allowed`` to be interrupted, as everything that takes long is, or until
# the end. The user's own signal handlers are left alone. A device thread is interrupted by the main one, which waits
# while the device thread is inside ``deferred``.

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ContextDecorator, contextmanager
from types import FrameType
from typing import Any

from compiled_llm.compat.forks import in_forked_processes
from compiled_llm.compat.signals import handler_of, set_handler


class _State:
    """The main thread's."""

    thread = threading.main_thread().ident
    allowed = True
    pending = False
    handles = False
    """Whether our handler is in the place of Python's own."""


class _Workers(threading.local):
    """The lock that a thread of ours holds while it must not be interrupted."""

    guard: threading.RLock | None = None


_workers = _Workers()


def guarded_by(guard: threading.RLock) -> None:
    """Let this thread take ``guard`` inside ``deferred``; a thread that interrupts it takes it first."""
    _workers.guard = guard


class deferred(ContextDecorator):  # noqa: N801
    """Defer Ctrl-C for the block, except where it is ``allowed``."""

    _context: AbstractContextManager[None] | None = None
    _defers = _outermost = False

    def __enter__(self) -> None:
        if _workers.guard is not None:
            self._context = _guarded(_workers.guard)
            self._context.__enter__()
        elif (
            _State.allowed  # inside ``deferred`` there is nothing left to do
            and threading.get_ident() == _State.thread
            and (_State.handles or handler_of(signal.SIGINT) in _OF_PYTHON_OR_OURS)
        ):
            self._outermost = not _State.handles
            try:
                self._defers, _State.allowed = True, False
                if self._outermost:
                    set_handler(signal.SIGINT, _on_interrupt)
                    _State.handles = True
            except BaseException:
                self.__exit__()
                raise

    def __exit__(self, *error: Any) -> None:
        if self._context is not None:
            self._context.__exit__(*error)
        if not self._defers:
            return
        try:
            if self._outermost:
                _State.handles = False
                if handler_of(signal.SIGINT) is _on_interrupt:  # a callback may have put its own there
                    set_handler(signal.SIGINT, signal.default_int_handler)
        finally:
            _State.allowed = True
        if _State.pending:
            check()

    def _recreate_cm(self) -> deferred:
        return deferred()


@contextmanager
def _guarded(guard: threading.RLock) -> Iterator[None]:
    with guard:
        _arrive()
        yield


class allowed:  # noqa: N801
    """Let Ctrl-C through for the block, inside ``deferred``."""

    # The innermost context, and never around the ``yield`` of another: a generator that was interrupted at its
    # ``yield`` is closed when its traceback is dropped, and would then undo a second time.

    _changed = False

    def __enter__(self) -> None:
        if _State.allowed or threading.get_ident() != _State.thread:
            return
        _State.allowed = True
        if _State.pending:  # checked last: from here on Ctrl-C is raised at once
            _State.allowed = False
            check()
        self._changed = True

    def __exit__(self, *_: object) -> None:
        if self._changed:
            _State.allowed = False


def check() -> None:
    """Raise KeyboardInterrupt if one of this thread's was deferred."""
    if _State.pending and threading.get_ident() == _State.thread:
        _State.pending = False
        raise KeyboardInterrupt


def _arrive() -> None:
    """Do nothing: an interrupt that was sent just before arrives at the latest when a function is entered."""


def _on_interrupt(signum: int, frame: FrameType | None) -> None:
    if _State.allowed:
        # A second one would hit the unwinding. A callback may have kept this handler, and put it back later.
        _State.allowed = not _State.handles
        raise KeyboardInterrupt
    _State.pending = True


_OF_PYTHON_OR_OURS = (signal.default_int_handler, _on_interrupt)


@in_forked_processes
def _begin_anew() -> None:
    """Begin again if another thread has forked: it is the main one now."""
    if _State.thread == threading.get_ident():
        return
    if _State.handles and handler_of(signal.SIGINT) is _on_interrupt:
        set_handler(signal.SIGINT, signal.default_int_handler)
    _State.thread, _State.allowed = threading.get_ident(), True
    _State.pending = _State.handles = False
