"""What a layer's code may look at: the attributes, tensors and inner modules, described so that layers compare."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from compiled_llm.model.modules import Children, same

# No forward reads the last one: whether HuggingFace has set a module's first weights.
_OF_EVERY_MODULE = (frozenset(vars(nn.Module())) - {"training"}) | {"_is_hf_initialized"}
_UNREAD_BY_LINEAR = frozenset({"training", "in_features", "out_features"})
_PLAIN = frozenset({int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device})


class State:
    """The attributes of modules, and the modules that they hold.

    Attributes:
        modules: all of them.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = modules
        self._children = Children(modules)
        self._attributes = [vars(module) for module in modules]
        names = [(vars(module), name) for module in modules for name in _names(module)]
        self._holders, self._names = [held for held, _ in names], [name for _, name in names]
        self._known = self._now()
        self._held_at: int | None = None

    def hold(self, glance: int | None = None) -> bool:
        """Whether all is as it was; a glance looks once."""
        if glance is not None and glance == self._held_at:
            return True
        holds = self._children.hold() and same(self._known, self._now())
        self._held_at = glance if holds else None
        return holds

    def _now(self) -> list[Any]:
        values = map(dict.get, self._holders, self._names)
        return [*map(type, self.modules), *map(len, self._attributes), *values]


class KnownState:
    """How the layers of a model were when an outline looked at them: one state for all outlines that saw the same."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self._state: State | None = None

    def of(self, modules: Sequence[nn.Module]) -> State:
        """Return the state of these modules as they are now."""
        known = self._state
        if known is None or not same([*known.modules], [*modules]) or not known.hold():
            known = self._state = State(modules)
        return known


def tensors_of(layer: nn.Module) -> list[dict[str, Any]]:
    """Return what holds the parameters and buffers of a layer."""
    held: list[dict[str, Any]] = []
    for module in layer.modules():
        held += module._parameters, module._buffers
    return held


def _names(module: nn.Module) -> list[str]:
    """Return the attributes that a module's code may read."""
    unread = _OF_EVERY_MODULE | _UNREAD_BY_LINEAR if type(module) is nn.Linear else _OF_EVERY_MODULE
    return [name for name in vars(module) if name not in unread]


def described_attributes(module: nn.Module, number: int) -> list[Hashable]:
    """Describe a module's attributes: what is not plain is the same only where it is one object."""
    return [
        (name, "its number" if name == "layer_idx" and value == number else plain(value))
        for name, value in ((name, vars(module)[name]) for name in _names(module))
    ]


def described_tensors(module: nn.Module) -> list[Hashable]:
    """Describe a module's own parameters and buffers by their layouts."""
    return [(name, layout(tensor)) for held in (module._parameters, module._buffers) for name, tensor in held.items()]


def layout(tensor: Tensor | None) -> Hashable:
    """Describe a tensor, but for its values and its address."""
    if tensor is None:
        return None
    layout = tensor.shape, tensor.stride(), tensor.requires_grad
    return type(tensor), tensor.dtype, tensor.device, *layout


def plain(value: Any) -> Hashable:
    """Describe a value: plain ones and tuples of them by what they are, others by their identity."""
    if type(value) in _PLAIN:
        return type(value), value
    return (tuple, *map(plain, value)) if type(value) is tuple else ("object", id(value))
