"""The context that a thread of ours starts in: its caller's, since torch keeps settings of its config there."""

# A new thread begins with an empty context, and would compile with torch's defaults for what a user has set. It ends
# when threads inherit contexts, as they may from Python 3.14 on.

from __future__ import annotations

from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar

T = TypeVar("T")

_of_calls: list[tuple[ContextVar[Any], Any]] = []


def of_one_call(variable: ContextVar[T], default: T) -> ContextVar[T]:
    """Return the variable, which concerns one call of a caller's and no thread that goes on after it."""
    _of_calls.append((variable, default))
    return variable


def callers_context() -> Context:
    """Return a copy of this thread's context for a thread that may outlive the call which starts it."""
    context = copy_context()
    for variable, default in _of_calls:
        context.run(variable.set, default)
    return context
