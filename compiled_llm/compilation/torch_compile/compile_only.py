"""Compiles a program without running it: what its graph is compiled into raises at its first call, and runs later."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import fx


class CompiledOnlyError(Exception):
    """A program was compiled, and is not run."""


class _OfThread(threading.local):
    compiles_only = False


_here = _OfThread()


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


def run_later(backend: Callable[..., Callable[..., Any]]) -> Callable[..., Callable[..., Any]]:
    """Return a backend of ``torch.compile`` whose graphs are not run by a thread that is ``compiling_only``."""

    @functools.wraps(backend, updated=())
    def compile(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return _not_run_yet(backend(module, inputs))

    return compile


def _not_run_yet(compiled: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compiled)
    def run(*arguments: object) -> object:
        if _here.compiles_only:
            raise CompiledOnlyError
        return compiled(*arguments)

    return run
