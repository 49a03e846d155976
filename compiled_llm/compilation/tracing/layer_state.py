"""State that a layer's code may read: attributes, tensors and inner modules, to compare layers and notice changes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from compiled_llm.model.modules import Children, holders, same

# The last one says whether HuggingFace has initialized a module's weights; no forward reads it.
_OF_EVERY_MODULE = (frozenset(vars(nn.Module())) - {"training"}) | {"_is_hf_initialized"}
_UNREAD_BY_LINEAR = frozenset({"training", "in_features", "out_features"})
_PLAIN = frozenset({int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device})


class State:
    """The attributes of all ``modules``, the modules inside them, and the names and the order of their tensors."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = modules
        self._children = Children(modules)
        self._attributes = [vars(module) for module in modules]
        names = [(vars(module), name) for module in modules for name in (*names_read(module), *holders(module))]
        self._owners, self._names = [owner for owner, _ in names], [name for _, name in names]
        # Where there was no tensor, Dynamo notices the first: it guards how many a layer has.
        self._tensors = [held for module in modules for held in (module._parameters, module._buffers) if held]
        self._tensor_names = self._tensor_names_now()
        self._known = self._now()
        self._valid_at: int | None = None

    def valid(self, glance: int | None = None) -> bool:
        """Whether the state is unchanged; ``glance`` as in ``Guards.valid``."""
        if glance is not None and glance == self._valid_at:
            return True
        valid = (
            self._children.valid()
            and same(self._known, self._now())
            and self._tensor_names == self._tensor_names_now()  # tensors of a layer are told apart by their order
        )
        self._valid_at = glance if valid else None
        return valid

    def _now(self) -> list[Any]:
        values = map(dict.get, self._owners, self._names)
        return [*map(type, self.modules), *map(vars, self.modules), *map(len, self._attributes), *values]

    def _tensor_names_now(self) -> list[str]:
        return list(chain.from_iterable(self._tensors))


class KnownState:
    """The state of a model's layers, shared by all outlines that were made of the layers in that state."""

    def __init__(self) -> None:
        self._state: State | None = None

    def of(self, modules: Sequence[nn.Module]) -> State:
        known = self._state
        if known is None or not same([*known.modules], [*modules]) or not known.valid():
            known = self._state = State(modules)
        return known

    def forget_changed(self) -> None:
        """Drop modules that have changed: parts that were replaced in them would be kept alive."""
        if self._state is not None and not self._state.valid():
            self._state = None


def tensors_of(layer: nn.Module) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for module in layer.modules():
        found += module._parameters, module._buffers
    return found


def names_read(module: nn.Module) -> list[str]:
    """Return the names of the attributes that a module's code may read."""
    unread = _OF_EVERY_MODULE | _UNREAD_BY_LINEAR if type(module) is nn.Linear else _OF_EVERY_MODULE
    return [name for name in vars(module) if name not in unread]


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


def is_plain(value: Any) -> bool:
    """Whether a value has no state beyond itself, so that equal ones are interchangeable."""
    return type(value) in _PLAIN


def plain(value: Any) -> Hashable:
    """Describe a value: a plain one, or a tuple of them, by itself, any other by its identity."""
    if is_plain(value):
        return type(value), value
    return (tuple, *map(plain, value)) if type(value) is tuple else ("object", id(value))
