"""Other objects: enumerations, what is called by name, and objects of libraries by their attributes."""

from __future__ import annotations

import enum
import functools
import sys
from functools import partial
from types import BuiltinMethodType, MethodWrapperType, ModuleType
from typing import Any

from compiled_llm.compilation.kept.fingerprint.plain import KEPT_BY_PYTHON, path_of
from compiled_llm.compilation.kept.fingerprint.visit import UnhashableError, Visit

_OF_LIBRARIES = frozenset({"torch", "transformers", "compiled_llm", "compiled_llm_ops", "peft"})
_BOUND = (BuiltinMethodType, MethodWrapperType)
_OF_ENTRIES = frozenset({"_value_", "_name_", "__objclass__", "_sort_order_", "_inverted_"})
"""Attributes that any entry of an enumeration has."""
_CACHED = type(functools.cache(lambda: None))


def describe_called(visit: Visit, value: Any, where: str) -> str:
    """Return the path of a function of C code's, and the object that it belongs to."""
    path = f"{type(value).__name__} {path_of(value)}"
    owner = value.__self__ if isinstance(value, _BOUND) else None
    if owner is None or isinstance(owner, (ModuleType, type)) or type(owner).__module__.startswith("pybind11"):
        return path
    visit.open(value)
    with visit.watching(True):
        return f"{path} of {visit.describe(owner, where)}"


def describe_enum(visit: Visit, value: enum.Enum, where: str) -> str:
    """Return the class and the value of an entry of an enumeration, and its attributes."""
    own = {name: held for name, held in vars(value).items() if name not in _OF_ENTRIES}
    visit.watch(value, ["_value_"])
    visit.watch(vars(value), own)
    entry = f"{visit.describe(type(value), where)} {value.name} {visit.describe(value.value, where)}"
    return "; ".join((entry, *visit.describe_attributes(own, where)))


def describe_object(visit: Visit, value: Any, where: str) -> str:
    """Return the name of an object of a library, whose attributes are an entry; UnhashableError for others'."""
    kind = type(value)
    if isinstance(value, _CACHED):  # the cache around a function, which Dynamo looks through
        visit.open(value)
        return visit.describe_all(where, (path_of(kind), value.__wrapped__))
    origin = kind.__module__.partition(".")[0]
    if origin in sys.stdlib_module_names or origin == "torch":
        return f"a {path_of(kind)}"  # its parts are nobody's: a guard that reads one is not covered
    if origin not in _OF_LIBRARIES:
        raise UnhashableError(f"{where} is an object of {path_of(kind)}")
    return visit.later(value, f"the {kind.__name__} of {where}", partial(_parts, visit, value))


def _parts(visit: Visit, value: object, name: str) -> str:
    own: dict[str, Any] = getattr(value, "__dict__", {})
    slots = {slot: getattr(value, slot) for base in type(value).__mro__ for slot in _slots_of(base, value)}
    visit.watch(value, ["__class__", *(slot for slot, held in slots.items() if visit.is_described(slot, held))])
    visit.watch(own, [attribute for attribute, held in own.items() if visit.is_described(attribute, held)])
    visit.objects.append((type(value), own))
    held = (f"{each}: {visit.describe_attribute(each, entry, name)}" for each, entry in {**slots, **own}.items())
    return "; ".join((visit.describe(type(value), name), *held))


def _slots_of(kind: type, value: object) -> list[str]:
    slots = vars(kind).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else slots
    return [name for name in names if name not in KEPT_BY_PYTHON and hasattr(value, name)]
