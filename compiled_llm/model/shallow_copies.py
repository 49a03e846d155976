"""Shallow copies of modules: a program runs one in the model's place, and nobody else sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from compiled_llm.compat.torch.module_calls import stop_noting


def shallow_copy(module: nn.Module, kind: type | None = None, **attributes: Any) -> Any:
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
    children = {**module._modules, name: with_another(inner, rest, change)}
    return shallow_copy(module, _modules=children)
