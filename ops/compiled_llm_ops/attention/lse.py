"""Attention as two ops rather than one with an optional output: without and with the log-sum-exp of the logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from compiled_llm_ops.contracts import DecodeAttention, PagedAttention
from compiled_llm_ops.library import define

_Arguments = TypeVar("_Arguments", PagedAttention, DecodeAttention)
Kernel = Callable[[_Arguments, bool], tuple[Tensor, Tensor | None]]
"""Returns ``[T, H, D]`` and, if the second argument says so, the log-sum-exp ``[T, H]``."""


def define_with_lse(
    name: str,
    arguments: type[_Arguments],
    *,
    writes: Sequence[str] = (),
    cpu: Kernel[_Arguments],
    cuda: Kernel[_Arguments],
) -> tuple[torch._ops.OpOverload, torch._ops.OpOverload]:
    """Define ``name``, and ``name_lse`` which also returns the log-sum-exp; arguments as of ``library.define``.

    Returns:
        Both overloads, to be bound once at module level.
    """
    out = define(
        name,
        arguments,
        writes=writes,
        fake=lambda args: _fake(args.query),
        cpu=lambda args: cpu(args, False)[0],
        cuda=lambda args: cuda(args, False)[0],
    )
    out_and_lse = define(
        f"{name}_lse",
        arguments,
        writes=writes,
        returns="(Tensor, Tensor)",
        fake=lambda args: (_fake(args.query), _fake_lse(args.query)),
        cpu=lambda args: cpu(args, True),
        cuda=lambda args: cuda(args, True),
    )
    return out, out_and_lse


def _fake(query: Tensor) -> Tensor:
    return query.new_empty(query.shape)


def _fake_lse(query: Tensor) -> Tensor:
    return query.new_empty(query.shape[:2], dtype=torch.float32)
