"""What a call can stand in: gradient modes, autocast, defaults, another thread."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from support.in_threads import in_thread


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


AROUND: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "enable_grad": torch.enable_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "default float64": lambda: _default_dtype(torch.float64),
    "default device": lambda: torch.device("meta"),
}


def inside(name: str, call: Callable[[], Any]) -> Any:
    """Run a call inside one of these, in a ``"thread"`` of its own, or just so."""
    if name == "thread":
        return in_thread(call)
    with AROUND.get(name, contextlib.nullcontext)():
        return call()
