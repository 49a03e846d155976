"""What code of the user's may read besides its arguments: opened one after the other, by ``Contents``."""

# Functions have closures, defaults, and globals that their code names; objects have attributes, and the attributes of
# their classes. Code of libraries is not looked into, nor what C code holds, such as arrays of NumPy.

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Iterator, Mapping, Set
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

from torch import nn

from compiled_llm.model.version.contents import Part, containers
from compiled_llm.model.version.functions import content_of, names_in

_LIBRARIES = frozenset({"torch", "transformers", "numpy", "compiled_llm", "compiled_llm_ops"}) | sys.stdlib_module_names


_HOLDERS = (nn.Module, SimpleNamespace, argparse.Namespace)
"""Classes of libraries whose objects hold what their user has given them."""


def parts_of(value: object) -> Iterator[Part]:
    """Yield the parts of a value that it may be read through."""
    if isinstance(value, functools.partial):
        yield (value.func, value.args, value.keywords)
    elif isinstance(value, MethodType):
        yield (value.__self__, value.__func__)
    elif isinstance(value, (staticmethod, classmethod)):
        yield (value.__func__,)
    elif isinstance(value, property):
        yield (value.fget,)
    elif isinstance(value, FunctionType):
        if not _is_library(value.__module__):
            yield from _parts_of_function(value)
    elif isinstance(value, type):
        if not _is_library(value.__module__):
            yield from _named_in(vars(value), {name for name in vars(value) if not _is_kept_by_python(name)})
    elif opened := [*containers(value)]:
        yield from opened
    elif isinstance(value, _HOLDERS) or not (isinstance(value, ModuleType) or _is_library(type(value).__module__)):
        yield type(value).__mro__
        if isinstance(attributes := getattr(value, "__dict__", None), dict):
            yield attributes


def _parts_of_function(function: FunctionType) -> Iterator[Part]:
    yield from (functools.partial(content_of, cell) for cell in function.__closure__ or ())
    yield functools.partial(getattr, function, "__defaults__")
    yield functools.partial(getattr, function, "__kwdefaults__")
    yield vars(function)
    names, found = names_in(function.__code__), function.__globals__
    for name in sorted(names & found.keys()):
        yield functools.partial(found.get, name)
        if isinstance(module := found[name], ModuleType) and not _is_library(module.__name__):
            yield from _named_in(vars(module), names)


def _named_in(attributes: Mapping[str, Any], names: Set[str]) -> Iterator[Part]:
    return (functools.partial(attributes.get, name) for name in sorted(names & attributes.keys()))


def _is_library(module: str | None) -> bool:
    return module is None or module.partition(".")[0] in _LIBRARIES


def _is_kept_by_python(name: str) -> bool:
    """Whether an attribute of a class is no code and no value of its author's."""
    return name.startswith("__") and name not in ("__call__", "__getattr__", "__getattribute__", "__init__")
