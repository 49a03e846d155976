"""Forked processes: they have one thread, the one that forked, and the locks that other threads held."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any


def in_forked_processes(begin: Callable[[], None]) -> Callable[[], None]:
    """Run ``begin`` first in every process forked from this one, in its only thread."""
    if hasattr(os, "register_at_fork"):  # where processes can be forked
        os.register_at_fork(after_in_child=begin)
    return begin


class HomeProcess:
    """The process that wrapped a model, which works nowhere else: forked ones lack its threads, and its CUDA device."""

    def __init__(self) -> None:
        self._id = os.getpid()

    @property
    def left(self) -> bool:
        """Whether this process is another one, forked from it."""
        return os.getpid() != self._id

    def check(self) -> None:
        """Raise a RuntimeError if this process was forked from that one."""
        if self.left:
            raise RuntimeError(
                "the model was wrapped in the process that this one was forked from, and works only there; load and "
                'wrap one here, or start this process by multiprocessing.get_context("spawn"), as CUDA needs'
            )


def lock() -> threading.RLock:
    """Return a lock that a forked process finds free, unless the thread that forks holds it."""
    # The garbage collector, the end of the interpreter and what a callback returns to take such locks in a forked
    # process as well. What another thread was changing under one stays half changed; nothing there reads it again.
    made = threading.RLock()
    _locks.add(made)
    return made


_locks: weakref.WeakSet[threading.RLock] = weakref.WeakSet()


@in_forked_processes
def _free_locks() -> None:
    held: Any
    for held in list(_locks):
        if not held._is_owned():
            held._at_fork_reinit()
