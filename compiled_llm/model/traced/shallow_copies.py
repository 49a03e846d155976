"""Shallow copies of modules: a program runs one in the model's place, and nobody else sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import nn

from compiled_llm.compat.torch.module_calls import stop_noting
from compiled_llm.model.version.module_tree import same


def shallow_copy(module: nn.Module, kind: type | None = None, **attributes: object) -> Any:
    """Return an object of a module's class, or of ``kind``, with its attributes but for those that are given."""
    copied: Any = object.__new__(kind or type(module))
    vars(copied).update(vars(module), **attributes)
    stop_noting(copied)  # it would call the module that it is a copy of
    return copied


def with_another(module: nn.Module, path: Sequence[str], change: Callable[[nn.Module], nn.Module]) -> Any:
    """Return a copy of ``module`` in which the module at ``path`` is what ``change`` makes of it."""
    if not path:
        return change(module)
    name, *rest = path
    inner = module._modules[name]
    assert inner is not None, "there is a module at the path"
    return with_children(module, {name: with_another(inner, rest, change)})


def with_children(module: nn.Module, children: Mapping[str, nn.Module]) -> Any:
    """Return a copy of ``module`` with other children of these names; itself if there are none."""
    return shallow_copy(module, _modules={**module._modules, **children}) if children else module


class ShallowCopies:
    """A maker of shallow copies of modules around those for which others stand."""

    def __init__(self, stand_ins: Mapping[nn.Module, nn.Module] = MappingProxyType({})) -> None:
        """``stand_ins`` are by the modules that they stand for."""
        self._known: dict[nn.Module, nn.Module] = dict(stand_ins)

    def copy_children(self, module: nn.Module) -> dict[str, nn.Module]:
        """Return, by name, copies of those of a module's children in which something changes."""
        copies = ((name, child, self.copy(child)) for name, child in module.named_children())
        return {name: copied for name, child, copied in copies if copied is not child}

    def copy(self, module: nn.Module) -> nn.Module:
        """Return a copy, or the module itself if nothing in it changes; of one in two places, one."""
        if module not in self._known:
            self._known[module] = module  # for those that hold themselves
            children = {name: None if child is None else self.copy(child) for name, child in module._modules.items()}
            self._known[module] = self._copied(module, children)
        return self._known[module]

    def _copied(self, module: nn.Module, children: dict[str, nn.Module | None]) -> nn.Module:
        """Return a module with these children in place of its own."""
        if same([*children.values()], [*module._modules.values()]):
            return module
        copied: nn.Module = shallow_copy(module, _modules=children)
        return copied
