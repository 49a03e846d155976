"""Private parts of torch that we depend on, one function each.

| what | for | ends when |
| --- | --- | --- |
| ``cudagraph_trees._initialize_tls`` / ``local`` | cudagraph trees on a thread of ours | torch < 2.13 is dropped |
| ``eval_frame.remove_from_cache`` | freeing a dropped model's graphs | Dynamo forgets code that nobody holds |
| ``eval_frame._debug_get_cache_entry_list`` | counting a function's graphs | torch reports them per function |
| ``cudagraph_trees.get_container`` | counting recordings | torch reports them |
"""

from __future__ import annotations

import importlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from threading import Lock
from types import CodeType, FunctionType
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def adopt_cudagraph_trees() -> None:
    """Give the current thread cudagraph trees of its own.

    Before pytorch#184357 (torch 2.13) only the thread that first imported the module had them, and a call from any
    other failed an assertion.
    """
    from torch._inductor import cudagraph_trees

    local = cudagraph_trees.local
    if not hasattr(local, "tree_manager_containers"):
        local.tree_manager_containers = {}
        local.tree_manager_locks = defaultdict(Lock)


def prepare_cudagraph_trees() -> None:
    """Let the calling thread be the one that imports cudagraph trees, and so keep them for the user's own graphs.

    Before torch 2.13 only the importing thread has them; ours get theirs from ``adopt_cudagraph_trees``.
    """
    importlib.import_module("torch._inductor.cudagraph_trees")


def own_copy(function: F) -> F:
    """Return the function with a code object of its own.

    Dynamo keeps what it compiled on the code object; without a copy, two models would share one cache, its limit, and
    each other's guards.
    """
    assert isinstance(function, FunctionType)
    code: CodeType = function.__code__.replace()
    copy = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy  # type: ignore[return-value]


def forget_when_gone(owner: object, functions: Sequence[Callable[..., Any]]) -> None:
    """Free the graphs of functions made by ``own_copy`` once ``owner`` is gone; Dynamo itself never forgets code."""
    weakref.finalize(owner, _forget, list(functions)).atexit = False


def _forget(functions: list[Callable[..., Any]]) -> None:
    from torch._dynamo.eval_frame import remove_from_cache

    for function in functions:
        remove_from_cache(function)


def graph_count(function: Callable[..., Any]) -> int:
    """Return how many graphs Dynamo holds for a function made by ``own_copy``."""
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list

    return len(_debug_get_cache_entry_list(function.__code__))


def cudagraph_skips() -> int:
    """Return how often Inductor has skipped cudagraphs so far in this process."""
    from torch._dynamo.utils import counters

    return int(counters["inductor"]["cudagraph_skips"])


def cudagraph_recordings(device: torch.device) -> int:
    """Return how many CUDA graphs the current thread's trees have recorded; call it on the thread that replays."""
    if device.type != "cuda":
        return 0
    from torch._inductor import cudagraph_trees

    manager = cudagraph_trees.get_container(device.index or 0).tree_manager
    return 0 if manager is None else _nodes(manager)


def _nodes(manager: Any) -> int:
    """Count the recorded nodes of all trees."""
    pending = [node for roots in manager.roots.values() for node in roots]
    count = 0
    while pending:
        node = pending.pop()
        count += 1
        pending.extend(child for children in node.children.values() for child in children)
    return count
