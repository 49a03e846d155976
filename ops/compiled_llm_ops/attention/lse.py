"""Attention as two ops rather than one with an optional output: without and with the log-sum-exp of the logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from compiled_llm_ops.attention.left_out import may_be_left_out
from compiled_llm_ops.contracts import (
    CascadeAttention,
    DecodeAttention,
    LatentAttention,
    LatentDecode,
    PagedAttention,
    value_size,
)
from compiled_llm_ops.library import define

_Arguments = TypeVar("_Arguments", PagedAttention, DecodeAttention, CascadeAttention, LatentAttention, LatentDecode)
_AnyOf = PagedAttention | DecodeAttention | CascadeAttention | LatentAttention | LatentDecode
"""Arguments whose first ones are the queries."""
Kernel = Callable[[_Arguments, bool], tuple[Tensor, Tensor | None]]
"""Returns ``[T, H, D]``, D that of the values, and, if the second argument says so, the log-sum-exp ``[T, H]``."""


def define_with_lse(
    name: str,
    arguments: type[_Arguments],
    *,
    writes: Sequence[str] = (),
    cpu: Kernel[_Arguments],
    cuda: Kernel[_Arguments],
) -> tuple[torch._ops.OpOverload, torch._ops.OpOverload]:
    """Define ``name``, and ``name_lse`` which also returns the log-sum-exp; arguments as of ``library.define``.

    Returns both overloads, to be bound once at module level.
    """
    without = define(
        name,
        arguments,
        writes=writes,
        fake=_out,
        cpu=may_be_left_out(lambda args: cpu(args, False)[0], _out),
        cuda=may_be_left_out(lambda args: cuda(args, False)[0], _out),
    )
    with_lse = define(
        f"{name}_lse",
        arguments,
        writes=writes,
        returns="(Tensor, Tensor)",
        fake=_out_and_lse,
        cpu=may_be_left_out(lambda args: cpu(args, True), _out_and_lse),
        cuda=may_be_left_out(lambda args: cuda(args, True), _out_and_lse),
    )
    return without, with_lse


def _out(args: _AnyOf) -> Tensor:
    query = args[0]
    return query.new_empty((*query.shape[:2], value_size(query, args.pages)))


def _out_and_lse(args: _AnyOf) -> tuple[Tensor, Tensor]:
    return _out(args), args[0].new_empty(args[0].shape[:2], dtype=torch.float32)
