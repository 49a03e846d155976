"""Forked processes: they have one thread, the one that forked, and the locks that other threads held."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch


def in_forked_processes(forget: Callable[[], None]) -> Callable[[], None]:
    """Run ``forget`` first in every process forked from this one, in its only thread."""
    if hasattr(os, "register_at_fork"):  # where processes can be forked
        os.register_at_fork(after_in_child=forget)
    return forget


def cuda_is_lost() -> bool:
    """Whether this process was forked from one that had used CUDA: it can never use it."""
    return torch.cuda._is_in_bad_fork()
