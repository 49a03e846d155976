"""The modules inside a model, checked in every call: to walk over them would take longer than to launch a step."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from operator import is_
from typing import Any

from torch import nn


class Children:
    """The children of modules, and whether they are still the same."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """Remember the children of ``modules``."""
        self._children = [module._modules for module in modules if module._modules]
        self._known = self._now()

    def valid(self) -> bool:
        """Whether none was added, removed or replaced."""
        return same(self._known, self._now())

    def _now(self) -> list[nn.Module | None]:
        return list(chain.from_iterable(map(dict.values, self._children)))


class InnerHooks:
    """The forward hooks on the modules inside a model, not on the model itself.

    They are compiled along with their modules, and Dynamo's guards do not notice when they change.
    """

    def __init__(self) -> None:
        """Prepare; the first call of ``of`` walks over the model."""
        self._children: Children | None = None
        self._modules: list[int] = []
        self._hooks: list[dict[int, Any]] = []

    def of(self, model: nn.Module) -> frozenset[tuple[int, int]]:
        """Return an id for each hook; ``model`` must be the same one each time."""
        if self._children is None or not self._children.valid():
            modules = list(model.modules())
            self._children = Children(modules)
            inner = [module for module in modules if module is not model]
            self._modules = [id(module) for module in inner for _ in range(2)]
            self._hooks = [hooks for module in inner for hooks in (module._forward_hooks, module._forward_pre_hooks)]
        if not any(self._hooks):
            return frozenset()
        return frozenset(
            (module, hook) for module, hooks in zip(self._modules, self._hooks, strict=True) for hook in hooks
        )


def has_hooks(module: nn.Module) -> bool:
    """Whether forward hooks are on the module itself."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def same(before: list[Any], now: list[Any]) -> bool:
    """Whether two lists hold the same objects."""
    return len(before) == len(now) and all(map(is_, before, now))
