"""Compiles a program without running it: what its graph is compiled into raises at its first call, and runs later."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class CompiledOnlyError(Exception):
    """A program was compiled, and is not run."""


class _OfThread(threading.local):
    compiles_only = False


_here = _OfThread()


def compiles_only() -> bool:
    """Return whether this thread compiles what it calls, and runs none of it."""
    return _here.compiles_only


@contextmanager
def compiling_only() -> Iterator[None]:
    """Compile what the block calls, and run none of it."""
    _here.compiles_only = True
    try:
        yield
    except CompiledOnlyError:
        pass
    finally:
        _here.compiles_only = False


def not_run_yet(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Return a compiled graph, which is not run by a thread that ``compiles_only``."""
    if not _here.compiles_only:
        return compiled

    @functools.wraps(compiled)
    def run(*arguments: Any) -> Any:
        if _here.compiles_only:
            raise CompiledOnlyError
        return compiled(*arguments)

    return run
