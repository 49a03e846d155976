"""Describes what a layer's code may read, its attributes and tensors, to compare it with other layers."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from compiled_llm.model.version.module_state import names_read

_PLAIN = frozenset({int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device})


def tensors_of(layer: nn.Module) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for module in layer.modules():
        found += module._parameters, module._buffers
    return found


def describe_attributes(module: nn.Module, number: int) -> list[Hashable]:
    """Describe a module's attributes; those that are not plain are equal only if they are the same object."""
    return [
        (name, "its number" if name == "layer_idx" and value == number else plain(value))
        for name, value in ((name, vars(module)[name]) for name in names_read(module))
    ]


def describe_tensors(module: nn.Module) -> list[Hashable]:
    """Describe a module's own parameters and buffers by their layouts."""
    tensors = (*module._parameters.items(), *module._buffers.items())
    return [(name, layout(tensor)) for name, tensor in tensors]


def layout(tensor: Tensor | None) -> Hashable:
    """Describe a tensor, but for its values and its address."""
    if tensor is None:
        return None
    return type(tensor), tensor.dtype, tensor.device, tensor.shape, tensor.stride(), tensor.requires_grad


def is_plain(value: object) -> bool:
    """Whether a value has no state beyond itself, so that equal ones are interchangeable."""
    return type(value) in _PLAIN


def plain(value: object) -> Hashable:
    """Describe a value: a plain one, or a tuple of them, by itself, any other by its identity."""
    if is_plain(value):
        return type(value), value
    return (tuple, *map(plain, value)) if type(value) is tuple else ("object", id(value))
