"""What a reader of other libraries' weights finds in a module."""

# Shapes: N outputs, K inputs, G groups of inputs with a scale of their own.

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from compiled_llm_ops.packed.formats import PackedWeight


class ReadWeight(NamedTuple):
    """A weight that our op multiplies by."""

    weight: PackedWeight
    bias: Tensor | None
    copied: int = 0  # bytes of tables that were made of the library's, which has others


class Stays(NamedTuple):
    """A weight that the library's module goes on multiplying by."""

    format: str
    reason: str


Found: TypeAlias = ReadWeight | Stays | None
"""What a reader says of a module; None if it is no module of its library, or has no weight of fewer bits."""


def as_parameters(read: ReadWeight) -> ReadWeight:
    """Return what was read as parameters over the same memory: no views of others, which would stay alive with them."""
    # A trial forward copies all tensors that it may write to: those that are no parameters.
    weight, bias, copied = read
    optional = (None if tensor is None else _parameter(tensor) for tensor in (weight.zeros, weight.nested, bias))
    zeros, nested, bias = optional
    codes, scales = _parameter(weight.codes), _parameter(weight.scales)
    return ReadWeight(weight._replace(codes=codes, scales=scales, zeros=zeros, nested=nested), bias, copied)


def _parameter(tensor: Tensor) -> nn.Parameter:
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    bare: Tensor = empty.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
    return nn.Parameter(bare, requires_grad=False)


def bias_of(module: nn.Module) -> Tensor | None:
    """Return a module's bias as programs read it."""
    bias = module._parameters.get("bias", module._buffers.get("bias"))
    return None if bias is None else bias.detach()


def numbers_in(words: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Return the unsigned numbers in words ``[..., W]`` of 32 bits, ``[..., W * 32 / bits]`` uint8."""
    # ``order`` says which number each place stands for, the lowest bits first; in turn if it is None.
    places = range(32 // bits) if order is None else [order.index(number) for number in range(len(order))]
    numbers = [words >> bits * place & (1 << bits) - 1 for place in places]
    return torch.stack(numbers, -1).flatten(-2).to(torch.uint8)


def inputs_of_a_scale(inputs: int, groups: int) -> int:
    """Return how many inputs share one of so many scales; 0 if all do."""
    return 0 if groups == 1 else -(-inputs // groups)
