"""Checks that hashes cover all that Dynamo guards: a kept program runs without its guards."""

from __future__ import annotations

import enum
import inspect
import re
import sys
from collections.abc import Collection, Iterable, Iterator
from itertools import pairwise
from types import (
    CellType,
    CodeType,
    DynamicClassAttribute,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)

from torch import nn

from compiled_llm.compat.huggingface import is_view
from compiled_llm.compat.torch.kept.guards import OF_PRESENCE, OF_PROCESS, OF_SIZES, Guarded, Step
from compiled_llm.compilation.kept.fingerprint.plain import BOOKKEEPING, UNNAMED, is_plain
from compiled_llm.compilation.kept.fingerprint.visit import Visit
from compiled_llm.model.version.module_state import UNREAD_BY_LINEAR

_OF_OUTLINES = re.compile(r"\._(tensors|number|like|beside)\b")
"""Attributes that only the layers of an outline have; the model's own layers are hashed, each of them."""

_OF_MODULES_CLASS = re.compile(r"dict\(type\(L\['model'\].*\)(\.__mro__\[\d+\])?\.__dict__\)")
"""Attributes of classes of a model's modules: all are hashed, but layers of an outline have one class more."""

_UNREAD = re.compile(rf"\b({'|'.join(UNREAD_BY_LINEAR)})\b\W*$")
"""Attributes that no hash has, since hardly a trace reads them."""

_HELD = (
    *(".__closure__", ".__defaults__", ".__kwdefaults__", ".__mro__", ".__dict__)", ".__dict__", "._fields"),
    ", '__dict__')",  # object.__getattribute__(config, '__dict__') of torch 2.11
)
"""The ends of expressions that Python makes a new value of each time, or that hold parts of a function or class."""

_BETWEEN = (CellType, CodeType, property, DynamicClassAttribute, staticmethod, classmethod)

_READ_BY_C = (MemberDescriptorType, GetSetDescriptorType, type(Step.name))  # the last: fields of named tuples
"""Descriptors that read what an object holds, and run no code of Python's."""

_HASHED_OF_ENTRIES = ("name", "value")
"""What an entry of an enumeration is hashed by, as it is read in each process."""

_ABSENT = object()

_OWN = ("compiled_llm", "compiled_llm_ops")
_HAVE_VERSIONS = ("compiled_llm.", "compiled_llm_ops.", "torch._dynamo.polyfills")
"""Modules that traces of any model are made with: our files are an entry, and Dynamo's are torch's version."""


def uncovered(guards: Collection[Guarded], walk: Visit, per_call: Collection[str]) -> list[str]:
    """Return what Dynamo guards and no hash would notice; arguments ``per_call`` are compared in each call."""
    computed = {*_computed_in(guards)}
    missing = (guard for guard in guards if not _covers(guard, walk, per_call, computed))
    return list({guard.about or guard.kind: None for guard in missing})


def _covers(guard: Guarded, walk: Visit, per_call: Collection[str], computed: Collection[str]) -> bool:
    if guard.kind in OF_PROCESS or guard.kind == OF_SIZES:
        return True
    if any(guard.about.startswith(f"L['{name}']") for name in per_call):
        return True
    if _UNREAD.search(guard.about) or any(step.expression in computed for step in guard.way):
        return False
    if guard.missing or not guard.way:
        return bool(_OF_OUTLINES.search(guard.about) or _OF_MODULES_CLASS.match(guard.about))
    return _covers_way(guard.way, walk)


def _covers_way(way: tuple[Step, ...], walk: Visit) -> bool:
    leaf, outer = way[-1], way[:-1]
    if any(step.name in UNNAMED for step in way):
        return False
    if str(way[0].name).startswith("__builtins_dict__"):
        return type(leaf.value).__name__ in ("builtin_function_or_method", "type")
    at = next((at for at in reversed(range(len(outer))) if not _is_between(outer[at])), None)
    if at is None:  # a global of the program's own function, or one that Dynamo has set for a module
        return isinstance(leaf.value, ModuleType) or _is_between(leaf) or walk.has_seen(leaf.value)
    owner = outer[at].value
    if isinstance(owner, ModuleType):
        name = str(way[at + 1].name)
        if owner is nn.modules.module and name.startswith("_global_"):
            return True  # hooks on all modules: with some, no program is kept
        if f"{owner.__name__}.{name}" in BOOKKEEPING:
            return True
        return owner.__name__.startswith(_HAVE_VERSIONS) or walk.has_read(owner, name)
    return walk.has_opened(owner) if _is_between(leaf) else walk.has_seen(leaf.value) or _has_version(owner, leaf.value)


def functions_read(guards: Iterable[Guarded]) -> Iterator[FunctionType]:
    """Yield functions that a trace has looked into; some of them were called by Dynamo, and not traced."""
    for guard in guards:
        yield from (step.value for step in guard.way[:-1] if isinstance(step.value, FunctionType))


def _has_version(owner: object, value: object) -> bool:
    """Whether a class is Python's, or a config's class of ours while a thread reads other implementations."""
    if not isinstance(owner, type):
        return False
    ours = is_view(owner) and str(getattr(value, "__module__", "")).partition(".")[0] in _OWN
    return ours or owner.__module__.partition(".")[0] in sys.stdlib_module_names


def _computed_in(guards: Iterable[Guarded]) -> Iterator[str]:
    """Yield the steps whose values some code computes when they are read: no hash of an owner's parts says them."""
    read = (guard.way[:-1] if guard.kind == OF_PRESENCE else guard.way for guard in guards)
    steps = {step.expression: (before.value, step) for way in read for before, step in pairwise(way)}
    yield from (expression for expression, (owner, step) in steps.items() if not _is_stored(owner, step))


def _is_stored(owner: object, step: Step) -> bool:
    """Whether a step reads what its owner or its owner's class holds."""
    if step.name is None or (isinstance(owner, enum.Enum) and step.name in _HASHED_OF_ENTRIES):
        return True
    of_kind = inspect.getattr_static(type(owner), step.name, None)
    if hasattr(type(of_kind), "__set__"):  # before what the owner holds by that name
        return isinstance(of_kind, _READ_BY_C)
    stored = inspect.getattr_static(owner, step.name, _ABSENT)
    if isinstance(owner, enum.EnumMeta) and step.name in owner.__members__:
        stored = owner.__members__[step.name]  # its class has what returns it, until Python 3.11
    if isinstance(step.value, MethodWrapperType) and isinstance(stored, WrapperDescriptorType):
        return True  # a slot of C, as `object` has where a layer of an outline, with one class more, has its own
    if is_plain(step.value):
        return type(stored) is type(step.value) and (stored is step.value or stored == step.value)
    return _unbound(stored) is _unbound(step.value)


def _unbound(value: object) -> object:
    """Return what a method is bound from; any other value as it is."""
    return value.__func__ if isinstance(value, (MethodType, staticmethod, classmethod)) else value


def _is_between(step: Step) -> bool:
    """Whether a step is no value of its own, but belongs to the one that it is read from."""
    return step.expression.endswith(_HELD) or isinstance(step.value, _BETWEEN) or is_plain(step.value)
