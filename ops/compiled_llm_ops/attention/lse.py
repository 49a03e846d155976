"""Attention as two ops rather than one with an optional output: without and with the log-sum-exp of the logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from compiled_llm_ops.attention.left_out import may_be_left_out
from compiled_llm_ops.contracts import value_size
from compiled_llm_ops.library import LIBRARY, define

_Arguments = TypeVar("_Arguments", bound=tuple[Any, ...])
"""Arguments whose first ones are the queries ``[T, H, D]``."""
Kernel = Callable[[_Arguments, bool], tuple[Tensor, Tensor | None]]
"""Returns ``[T, H, D]``, D that of the values, and, if the second argument says so, the log-sum-exp ``[T, H]``."""


def _over_pages(args: Any) -> tuple[int, int, int]:
    """Return the shape of results over ``pages``."""
    query = args[0]
    return query.shape[0], query.shape[1], value_size(query, args.pages)


def define_with_lse(
    name: str,
    arguments: type[_Arguments],
    *,
    writes: Sequence[str] = (),
    cpu: Kernel[_Arguments],
    cuda: Kernel[_Arguments],
    sizes: Callable[[_Arguments], tuple[int, int, int]] = _over_pages,
    library: torch.library.Library = LIBRARY,
) -> tuple[torch._ops.OpOverload, torch._ops.OpOverload]:
    """Define ``name``, and ``name_lse`` which also returns the log-sum-exp; arguments as of ``library.define``.

    ``sizes`` returns the shape of the first result. Returns both overloads, to be bound once at module level.
    """

    def _out(args: _Arguments) -> Tensor:
        query: Tensor = args[0]
        return query.new_empty(sizes(args))

    def _out_and_lse(args: _Arguments) -> tuple[Tensor, Tensor]:
        query: Tensor = args[0]
        return _out(args), query.new_empty(query.shape[:2], dtype=torch.float32)

    without = define(
        name,
        arguments,
        writes=writes,
        fake=_out,
        cpu=may_be_left_out(lambda args: cpu(args, False)[0], _out),
        cuda=may_be_left_out(lambda args: cuda(args, False)[0], _out),
        library=library,
    )
    with_lse = define(
        f"{name}_lse",
        arguments,
        writes=writes,
        returns="(Tensor, Tensor)",
        fake=_out_and_lse,
        cpu=may_be_left_out(lambda args: cpu(args, True), _out_and_lse),
        cuda=may_be_left_out(lambda args: cuda(args, True), _out_and_lse),
        library=library,
    )
    return without, with_lse
