"""The modules inside a model, checked in every call: walking over them would take longer than launching a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from operator import is_, itemgetter
from typing import Any, NamedTuple

from torch import nn

from compiled_llm.compat.huggingface import captures_outputs
from compiled_llm.compat.torch.modes import hooks_on_all_modules

_HOOKS = itemgetter("_forward_hooks", "_forward_pre_hooks")  # looked up: they may have been replaced
_HOLDERS = ("_modules", "_parameters", "_buffers")
_MIXING = {"peft.tuners.lily.": "a Lily adapter"}  # it weighs its experts by an average over tokens


class Children:
    """The children of modules, and whether they are still the same."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._children = [module._modules for module in modules if module._modules]
        self._known = self._now()

    def valid(self) -> bool:
        return same(self._known, self._now())

    def _now(self) -> list[nn.Module | None]:
        return list(chain.from_iterable(map(dict.values, self._children)))


class Obstacles(NamedTuple):
    """Parts of a model that cannot take packed tokens and padded batches.

    Attributes:
        hooked: whether there are forward hooks, those on all modules of the process included.
        mixing: a kind of module that makes tokens depend on all others of a call, padding and later ones included.
    """

    hooked: bool
    mixing: str | None


class InnerModules:
    """The modules inside a model, not the model itself, and their parts that cannot take packed and padded tokens.

    A forward hook expects the shapes that HuggingFace's forward shows it, and Dynamo's guards do not notice when hooks
    change.
    """

    def __init__(self, walked: Callable[[nn.Module], None] = lambda model: None) -> None:
        """``walked`` is called with the model when the first look walks over it, and whenever modules were replaced."""
        self._walked = walked
        self._children: Children | None = None
        self._inner: list[dict[str, Any]] = []
        self._mixing: str | None = None

    def obstacles(self, model: nn.Module) -> Obstacles:
        """Return the parts that keep a call on HuggingFace's forward; ``model`` must be the same one each time."""
        hooked = any(True for _ in self._hooks(model))  # looks at the modules, and so knows what mixes
        return Obstacles(hooked or hooks_on_all_modules(), self._mixing)

    def hooks(self, model: nn.Module) -> frozenset[tuple[int, int]]:
        return frozenset(self._hooks(model))

    def _hooks(self, model: nn.Module) -> Iterator[tuple[int, int]]:
        for hooks in filter(None, chain.from_iterable(map(_HOOKS, self._attributes_inside(model)))):
            yield from ((id(hooks), id(hook)) for hook in hooks.values() if not captures_outputs(hook))

    def _attributes_inside(self, model: nn.Module) -> list[dict[str, Any]]:
        if self._children is None or not self._children.valid():
            modules = list(model.modules())
            self._walked(model)
            self._inner = [vars(module) for module in modules if module is not model]
            self._mixing = next(filter(None, map(_kind_that_mixes, modules)), None)
            self._children = Children(modules)  # last: other threads then take the rest for known
        return self._inner


def _kind_that_mixes(module: nn.Module) -> str | None:
    return next((kind for start, kind in _MIXING.items() if type(module).__module__.startswith(start)), None)


def has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def holders(module: nn.Module) -> list[str]:
    """Return the attributes that hold a module's tensors and the modules inside it, if there are any."""
    return [name for name in _HOLDERS if vars(module)[name]]


def same(before: list[Any], now: list[Any]) -> bool:
    return len(before) == len(now) and all(map(is_, before, now))
