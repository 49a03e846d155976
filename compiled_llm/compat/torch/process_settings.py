"""Keeps a thread that compiles from putting settings of the process back to what they were when it began."""

# Dynamo remembers the states of the process's generators, its default dtype, and how exact its matmuls are while it
# traces, and sets them again at the end. What other threads have drawn meanwhile, they would draw once more: two
# requests without seeds would get the same one. What a user has set meanwhile would be lost.
# It ends when torch no longer does so in threads: as of torch 2.15 it does.

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from compiled_llm.compat.forks import lock

_SETTERS: tuple[tuple[Any, str], ...] = (
    (random, "setstate"),
    (torch.random, "set_rng_state"),
    (torch.cuda, "set_rng_state"),
    (torch, "set_default_dtype"),
    (torch, "use_deterministic_algorithms"),
    (torch._C, "_set_fp32_precision_setter"),
)
"""The functions by which Dynamo restores them; it looks each up in its module at every call."""

_threads: set[int] = set()
"""Those that set nothing."""

_lock = lock()


@contextmanager
def settings_left_alone() -> Iterator[None]:
    """Let calls of this thread that set one of these do nothing in the block."""
    thread = threading.get_ident()
    with _lock:
        _threads.add(thread)
        for module, name in _SETTERS:
            if not isinstance(setter := getattr(module, name), _Setter):
                setattr(module, name, _Setter(setter))
    try:
        yield
    finally:
        with _lock:
            _threads.discard(thread)
            for module, name in () if _threads else _SETTERS:
                # Another thread that traces may have put something in its place for a while, and brings it back.
                if isinstance(setter := getattr(module, name), _Setter):
                    setattr(module, name, setter.own)


def was_disturbed(error: BaseException) -> bool:
    """Return whether Dynamo gave a trace up because another thread has changed a setting of the process meanwhile."""
    return isinstance(error, AssertionError) and "state changed while dynamo tracing" in str(error)


class _Setter:
    """Sets one of them for other threads."""

    def __init__(self, own: Callable[..., Any]) -> None:
        self.own = own
        functools.update_wrapper(self, own)

    def __call__(self, *arguments: object, **named: object) -> object:
        return None if threading.get_ident() in _threads else self.own(*arguments, **named)
