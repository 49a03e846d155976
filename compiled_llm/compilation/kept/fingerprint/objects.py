"""Other objects: enumerations, what is called by name, and objects of libraries by their attributes."""

from __future__ import annotations

import dataclasses
import enum
import functools
import re
import sys
from contextvars import ContextVar
from types import BuiltinMethodType, MethodWrapperType, ModuleType
from typing import Any

from compiled_llm.compilation.kept.fingerprint.plain import KEPT_BY_PYTHON, is_plain, path_of
from compiled_llm.compilation.kept.fingerprint.visit import UnhashableError, Visit

_OF_LIBRARIES = frozenset({"torch", "transformers", "compiled_llm", "compiled_llm_ops", "peft"})
_BOUND = (BuiltinMethodType, MethodWrapperType)
_OF_ENTRIES = frozenset({"_value_", "_name_", "__objclass__", "_sort_order_", "_inverted_"})
"""Attributes that any entry of an enumeration has."""
_CACHED = type(functools.cache(lambda: None))


def describe_called(visit: Visit, value: Any, where: str) -> str:
    """Return the path of a function of C code's, and the object that it belongs to."""
    said = f"{type(value).__name__} {path_of(value)}"
    owner = value.__self__ if isinstance(value, _BOUND) else None
    if owner is None or isinstance(owner, (ModuleType, type)) or type(owner).__module__.startswith("pybind11"):
        return said
    visit.open(value)
    with visit.watching(True):
        return f"{said} of {visit.said(owner, where)}"


def describe_enum(visit: Visit, value: enum.Enum, where: str) -> str:
    """Return the class and the value of an entry of an enumeration, and its attributes."""
    own = {name: held for name, held in vars(value).items() if name not in _OF_ENTRIES}
    visit.watch(value, "_value_")
    visit.watch(vars(value), *own)
    said = (f"; {name}: {visit.attribute(name, held, where)}" for name, held in own.items())
    return f"{visit.said(type(value), where)} {value.name} {visit.said(value.value, where)}{''.join(said)}"


def describe_pattern(visit: Visit, value: re.Pattern[Any], where: str) -> str:
    """Return a regular expression."""
    return f"pattern {value.pattern!r} {value.flags}"


def describe_variable(visit: Visit, value: ContextVar[Any], where: str) -> str:
    """Return what a variable of this context is, if that is plain; Dynamo reads none so far."""
    held = value.get(None)
    return f"a variable, {held!r}" if is_plain(held) else f"a variable, of {path_of(type(held))}"


def describe_field(visit: Visit, field: dataclasses.Field[Any], where: str) -> str:
    """Return a field of a dataclass."""
    factory = None if field.default_factory is dataclasses.MISSING else field.default_factory
    default = None if field.default is dataclasses.MISSING else field.default
    return visit.all(where, "field", field.name, default, factory, field.init)


def describe_object(visit: Visit, value: Any, where: str) -> str:
    """Return the name of an object of a library, whose attributes are an entry; UnhashableError for others'."""
    kind = type(value)
    if isinstance(value, _CACHED):  # the cache around a function, which Dynamo looks through
        visit.open(value)
        return visit.all(where, path_of(kind), value.__wrapped__)
    origin = kind.__module__.partition(".")[0]
    if origin in sys.stdlib_module_names or origin == "torch":
        return f"a {path_of(kind)}"  # its parts are nobody's: a guard that reads one is not covered
    if origin not in _OF_LIBRARIES:
        raise UnhashableError(f"{where} is an object of {path_of(kind)}")
    return visit.later(value, f"the {kind.__name__} of {where}", lambda name: _parts(visit, value, name))


def _parts(visit: Visit, value: Any, name: str) -> str:
    own: dict[str, Any] = getattr(value, "__dict__", {})
    slots = [slot for base in type(value).__mro__ for slot in _slots_of(base) if hasattr(value, slot)]
    held = {**{slot: getattr(value, slot) for slot in slots}, **own}
    visit.watch(value, "__class__", *(slot for slot in slots if visit.tells(slot, held[slot])))
    visit.watch(own, *(attribute for attribute, entry in own.items() if visit.tells(attribute, entry)))
    visit.objects.append((type(value), own))
    said = (f"{attribute}: {visit.attribute(attribute, entry, name)}" for attribute, entry in held.items())
    return "; ".join((visit.said(type(value), name), *said))


def _slots_of(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return tuple(slot for slot in ((slots,) if isinstance(slots, str) else slots) if slot not in KEPT_BY_PYTHON)
