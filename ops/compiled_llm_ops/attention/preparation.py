"""Norm and rotary embedding of queries and keys before attention, for the ops that do it: checks, and plain PyTorch."""

# Shapes: T tokens, D head dimension.

from __future__ import annotations

import torch
from torch import Tensor

from compiled_llm_ops.contracts import DecodeAttention, RopeAppendPagedKv

Arguments = DecodeAttention | RopeAppendPagedKv


def check_preparation(op: str, args: Arguments) -> None:
    """Raise ValueError if what queries and keys are normed and rotated with does not fit them."""
    tokens, _, head_dim = args.query.shape
    if (args.cos is None) is not (args.sin is None):
        raise ValueError(f"{op}: cos and sin must be given together")
    if args.cos is not None and head_dim % 2:
        raise ValueError(f"{op}: heads of size {head_dim} cannot be turned: the size is odd")
    sizes = {"query_norm": (head_dim,), "key_norm": (head_dim,), "cos": (tokens, head_dim), "sin": (tokens, head_dim)}
    for name, size in sizes.items():
        tensor = getattr(args, name)
        if tensor is not None and (tensor.shape != size or tensor.dtype != args.query.dtype):
            raise ValueError(
                f"{op}: {name} must be {size} {args.query.dtype}; got {tuple(tensor.shape)} {tensor.dtype}"
            )


def prepared(states: Tensor, norm: Tensor | None, args: Arguments) -> Tensor:
    """Return ``[T, heads, D]`` queries or keys, normed and rotated as HuggingFace's models do it."""
    if norm is not None:
        values = states.float()
        values = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + args.epsilon)
        states = norm * values.to(states.dtype)
    if args.cos is not None and args.sin is not None:
        first, second = states.chunk(2, -1)
        states = states * args.cos[:, None] + torch.cat([-second, first], -1) * args.sin[:, None]
    return states
