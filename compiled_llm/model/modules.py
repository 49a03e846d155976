"""The modules inside a model, checked in every call: to walk over them would take longer than to launch a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from operator import is_, itemgetter
from typing import Any

from torch import nn

from compiled_llm.compat import hooks_on_all_modules
from compiled_llm.compat.huggingface import captures_outputs

_HOOKS = (itemgetter("_forward_hooks"), itemgetter("_forward_pre_hooks"))  # looked up: they may have been replaced


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

    A hook expects the shapes that HuggingFace's forward shows it, and Dynamo's guards do not notice when hooks change.
    """

    def __init__(self) -> None:
        """Prepare; the first look walks over the model."""
        self._children: Children | None = None
        self._inner: list[dict[str, Any]] = []

    def on(self, model: nn.Module) -> bool:
        """Return whether there are any, those on all modules of the process included.

        Args:
            model: the same one each time.
        """
        return hooks_on_all_modules() or any(True for _ in self._hooks(model))

    def of(self, model: nn.Module) -> frozenset[tuple[int, int]]:
        """Return an id for each hook; ``model`` must be the same one each time."""
        return frozenset(self._hooks(model))

    def _hooks(self, model: nn.Module) -> Iterator[tuple[int, int]]:
        inner = self._attributes_inside(model)
        for hooks in chain(*(filter(None, map(hooks_of, inner)) for hooks_of in _HOOKS)):
            yield from ((id(hooks), id(hook)) for hook in hooks.values() if not captures_outputs(hook))

    def _attributes_inside(self, model: nn.Module) -> list[dict[str, Any]]:
        if self._children is None or not self._children.valid():
            modules = list(model.modules())
            self._children = Children(modules)
            self._inner = [vars(module) for module in modules if module is not model]
        return self._inner


def has_hooks(module: nn.Module) -> bool:
    """Whether forward hooks are on the module itself."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def same(before: list[Any], now: list[Any]) -> bool:
    """Whether two lists hold the same objects."""
    return len(before) == len(now) and all(map(is_, before, now))
