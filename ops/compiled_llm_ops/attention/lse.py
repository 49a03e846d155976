"""Attention as two ops rather than one with an optional output: without and with the log-sum-exp of the logits."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ParamSpec

import torch
from torch import Tensor

from compiled_llm_ops.attention.left_out import may_be_left_out
from compiled_llm_ops.contracts import value_size
from compiled_llm_ops.library import Arguments, define_op, definitions, kernel_of

_Parameters = ParamSpec("_Parameters")
_Kernel = Callable[[Arguments, bool], tuple[Tensor, Tensor | None]]


def over_pages(query: Tensor, pages: Tensor) -> Tensor:
    """Return uninitialised results of queries ``[T, H, D]`` over pages: ``[T, H, E]``, E the size of values."""
    return query.new_empty((query.shape[0], query.shape[1], value_size(query, pages)))


def new_lse(query: Tensor) -> Tensor:
    """Return uninitialised log-sum-exps ``[T, H]`` float32 of queries ``[T, H, D]``."""
    return query.new_empty(query.shape[:2], dtype=torch.float32)


_DOCUMENTED = """``{name}`` that also returns the log-sum-exp of each query's logits.

Args: those of ``{name}``.

Returns:
    Its result.
    ``[T, H]`` float32: the log-sum-exp in base 2 (times ln 2 for the natural one); -inf for a query that sees no key.

Raises:"""


ATTENTIONS: dict[torch._ops.OpOverload, type[Any]] = {}
"""Our ops of attention, each with its arguments."""

_with_lse: dict[Callable[..., Any], Callable[..., tuple[Tensor, Tensor]]] = {}


def with_lse(attention: Callable[_Parameters, Tensor]) -> Callable[_Parameters, tuple[Tensor, Tensor]]:
    """Define the op ``NAME_lse`` beside an op ``NAME``, whose first argument are queries ``[T, H, D]``."""
    arguments, writes, fake, library = definitions[attention]

    def both(args: Any) -> tuple[Tensor, Tensor]:
        return fake(args), new_lse(args[0])

    name = both.__name__ = attention.__name__ + "_lse"
    rest = (inspect.getdoc(attention) or "").partition("Raises:")[2]
    both.__qualname__ = name
    both.__module__ = attention.__module__
    both.__doc__ = _DOCUMENTED.format(name=attention.__name__) + rest
    _with_lse[attention] = define_op(arguments, writes=writes, library=library)(both)
    namespace = getattr(torch.ops, library.ns)
    ATTENTIONS.update({getattr(namespace, op).default: arguments for op in (attention.__name__, name)})
    return _with_lse[attention]


def kernel_of_both(attention: Callable[..., Tensor], device: str) -> Callable[[_Kernel[Arguments]], _Kernel[Arguments]]:
    """As ``kernel_of``, for ``with_lse`` of ``attention`` as well; without, the log-sum-exp is not asked for."""
    # A kernel may return it nevertheless. A capture may leave both out.
    attention_lse = _with_lse[attention]

    def register(function: _Kernel[Arguments]) -> _Kernel[Arguments]:
        alone = may_be_left_out(lambda args: function(args, False)[0], definitions[attention].fake)
        both = may_be_left_out(lambda args: function(args, True), definitions[attention_lse].fake)
        kernel_of(attention, device)(alone)
        kernel_of(attention_lse, device)(both)
        return function

    return register
