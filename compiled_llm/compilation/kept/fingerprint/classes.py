"""Classes: their bases and members."""

from __future__ import annotations

import enum
import functools
import inspect
import sys
from collections.abc import Iterator
from functools import partial
from types import FunctionType

from compiled_llm.compat.torch.dynamo import before_tracing
from compiled_llm.compilation.kept.fingerprint.code import code_digest
from compiled_llm.compilation.kept.fingerprint.plain import is_named, is_plain, path_of
from compiled_llm.compilation.kept.fingerprint.visit import Visit

_WRAPPERS = (FunctionType, staticmethod, classmethod, property, functools.cached_property)

_RUN_BY_ISINSTANCE = ("__class__", "__subclasshook__")
_RUN_BEFORE = (
    *("__new__", "__init__", "__prepare__", "__init_subclass__", "__setattr__", "__delattr__"),
    *("_generate_next_value_", "__new_member__"),
)
"""What runs while a class or an entry is made or changed: what comes of it is hashed."""


def describe_class(visit: Visit, kind: type, where: str) -> str:
    """Return a class's path; its parts are an entry, unless they follow from Python's version."""
    if kind.__module__ == "builtins" or kind.__module__.partition(".")[0] in sys.stdlib_module_names:
        visit.open(kind)
        return f"class {path_of(kind)}"
    return visit.later(kind, f"class {path_of(kind)}", partial(_parts, visit, kind))


def _parts(visit: Visit, kind: type, name: str) -> str:
    bases = visit.describe_all(name, (type(kind), *kind.__mro__[1:]))
    visit.hidden += map(_function_of, _hidden_in(kind))
    members = {member: value for member, value in sorted(vars(kind).items()) if is_named(member)}
    visit.watch(kind, ["__mro__", *(member for member, value in members.items() if _counts(visit, member, value))])
    described = (f"{member}: {_member(visit, member, value, name)}" for member, value in members.items())
    return "; ".join((bases, *described))


def _counts(visit: Visit, member: str, value: object) -> bool:
    """Whether a member of a class is plain, or was traced or looked into: another one would make another trace."""
    function = _function_of(value)
    if not isinstance(function, FunctionType):
        return is_plain(value) or visit.is_described(member, value)
    if traced := code_digest(before_tracing(function).__code__) in visit.traced:
        visit.methods.add(member)
    return traced


def _function_of(member: object) -> object:
    return getattr(member, "fget", None) or getattr(member, "__func__", member)


def _hidden_in(kind: type) -> Iterator[object]:
    """Yield the members that may run unseen where a class, or an entry of an enumeration, is used as a constant."""
    of_constants = issubclass(kind, (type, enum.Enum))
    for base in inspect.getmro(kind) if of_constants else (kind,):
        for name, member in vars(base).items():
            if name not in _RUN_BEFORE and (of_constants or name in _RUN_BY_ISINSTANCE):
                yield member


def _member(visit: Visit, member: str, value: object, name: str) -> str:
    if isinstance(value, _WRAPPERS):
        return visit.describe(value, name)
    return visit.describe_attribute(member, value, name)
