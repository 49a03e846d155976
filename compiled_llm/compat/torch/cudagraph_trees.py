"""Cudagraph trees: the threads that own them, and the number of their CUDA graphs."""

from __future__ import annotations

import importlib
import logging
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch


def adopt_cudagraph_trees() -> None:
    """Give the current thread cudagraph trees of its own."""
    # Before pytorch#184357 (torch 2.13) only the thread that first imported the module had them, and a call from any
    # other failed an assertion.
    from torch._inductor import cudagraph_trees

    local = cudagraph_trees.local
    if not hasattr(local, "tree_manager_containers"):
        local.tree_manager_containers = {}
        local.tree_manager_locks = defaultdict(Lock)


def prepare_cudagraph_trees() -> None:
    """Let the calling thread be the one that imports cudagraph trees, and so keep them for the user's own graphs."""
    # Before torch 2.13 only the importing thread has them; ours get theirs from ``adopt_cudagraph_trees``. A model
    # whose graphs are not those of cudagraph trees leaves the import to the user.
    importlib.import_module("torch._inductor.cudagraph_trees")


def cudagraph_skips() -> int:
    """Return how often Inductor has skipped cudagraphs so far in this process."""
    from torch._dynamo.utils import counters

    return int(counters["inductor"]["cudagraph_skips"])


def cudagraph_tree_graphs(device: torch.device) -> int:
    """Return how many CUDA graphs the current thread's trees have captured; call it on the thread that replays."""
    # Before torch 2.13 a thread has trees only if it imported the module or has adopted some: others have captured
    # none.
    from torch._inductor.cudagraph_trees import local

    container = getattr(local, "tree_manager_containers", {}).get(device.index or 0)
    return 0 if container is None or container.tree_manager is None else _nodes(container.tree_manager)


def _nodes(manager: Any) -> int:
    """Count the captured nodes of all trees."""
    pending = [node for roots in manager.roots.values() for node in roots]
    count = 0
    while pending:
        node = pending.pop()
        count += 1
        pending.extend(child for children in node.children.values() for child in children)
    return count


@contextmanager
def cudagraph_messages() -> Iterator[list[str]]:
    """Collect Inductor's messages about CUDA graphs that it does not capture, or captures again, during the block."""
    collector = _Messages()
    logger = logging.getLogger("torch._inductor.cudagraph_utils.__cudagraphs")
    logger.addHandler(collector)
    try:
        yield collector.messages
    finally:
        logger.removeHandler(collector)


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
