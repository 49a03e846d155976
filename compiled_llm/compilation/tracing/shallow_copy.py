"""Shallow copies of modules, from which programs are traced in place of the modules themselves."""

from __future__ import annotations

from typing import Any

from torch import nn

from compiled_llm.compat.torch.module_calls import stop_noting


def shallow_copy(module: nn.Module, kind: type, **attributes: Any) -> Any:
    """Return a module of class ``kind`` with the attributes of ``module``, but for those that are given."""
    copied: Any = object.__new__(kind)
    vars(copied).update(vars(module), **attributes)
    stop_noting(copied)  # it would call the module that it is a copy of
    return copied
