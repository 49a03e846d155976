"""A condition that Ctrl-C leaves either taken or free."""

from __future__ import annotations

import threading
from operator import attrgetter

from compiled_llm.compat.forks import lock


class Condition(threading.Condition):
    """A condition like that of ``threading``, whose ``with`` takes its lock in a method written in Python."""

    # KeyboardInterrupt may be raised in there once the lock is taken and before the block has begun; then it is never
    # released, and all other threads wait for ever. ``with`` finds the lock's own methods here, which are written in C:
    # between these and the block Python raises nothing. Ends when ``threading.Condition`` does so itself
    # (https://github.com/python/cpython/issues/74174).

    def __init__(self) -> None:
        self._own = lock()
        super().__init__(self._own)

    # Both are looked up before the lock is taken.
    __enter__ = property(attrgetter("_own.__enter__"))  # pyright: ignore[reportAssignmentType]
    __exit__ = property(attrgetter("_own.__exit__"))  # pyright: ignore[reportAssignmentType]
