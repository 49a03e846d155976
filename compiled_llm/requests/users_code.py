"""Errors in the user's code that the engine calls: logits processors, listeners, tokenizers."""

# Such code may raise anything: ``SystemExit`` from a script that it runs, a ``CancelledError`` of asyncio's, the
# ``PanicException`` of a library in Rust, none of which is an ``Exception``. It ends the request that the code was
# called for, never the thread that has called it.

from __future__ import annotations

import threading


def is_interrupt(error: BaseException) -> bool:
    """Whether an error is the user's Ctrl-C, which Python raises in the main thread and nowhere else."""
    return isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


def raise_interrupt(error: BaseException) -> None:
    """Raise an error again if it is the user's Ctrl-C."""
    if is_interrupt(error):
        raise error


def failure_of(error: BaseException) -> Exception:
    """Return a request's failure as an ``Exception``, which ends no thread that raises it."""
    if isinstance(error, Exception):
        return error
    failure = RuntimeError(f"the engine has failed of {described(error)}")
    failure.__cause__ = error
    return failure


def described(error: BaseException) -> str:
    """Return an error's name and message, even if its ``__str__`` fails."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__
