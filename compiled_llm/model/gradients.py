"""Finds out whether a call of a model would record gradients into any tensor that its modules hold."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_HOLDERS = (Tensor, dict, list, tuple, functools.partial, MethodType, FunctionType)
_DEPTH = 4  # of containers in containers


def requires_gradients(model: nn.Module) -> bool:
    """Return whether a tensor that a module of ``model`` holds requires gradients."""
    # It may be a parameter, a buffer, an attribute, in a container, or closed over by a method that an instance has of
    # its own: soft prompts and adapters are kept in any of these.
    return any(map(_holds_one, model.modules()))


def _holds_one(module: nn.Module) -> bool:
    for registered in (module._parameters, module._buffers):
        for tensor in registered.values():
            if tensor is not None and tensor.requires_grad:
                return True
    others = [value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE and _may_hold(type(value))]
    return bool(others) and _any_requires(others, _DEPTH)


def _any_requires(values: Iterable[Any], depth: int) -> bool:
    return any(
        value.requires_grad if isinstance(value, Tensor) else depth and _any_requires(_entries(value), depth - 1)
        for value in values
        if _may_hold(type(value))
    )


def _is_holder(kind: type) -> bool:
    return issubclass(kind, _HOLDERS)


_may_hold: Callable[[Any], bool] = functools.lru_cache(maxsize=256)(_is_holder)  # of classes that may come and go


def _entries(value: object) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, functools.partial):
        return (value.func, value.args, value.keywords)
    if isinstance(value, MethodType):
        return (value.__func__,)
    return _closed_over(value) if isinstance(value, FunctionType) else ()


def _closed_over(function: FunctionType) -> Iterator[Any]:
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # it is still empty
            continue
