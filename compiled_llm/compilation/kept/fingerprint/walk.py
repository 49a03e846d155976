"""Walks over all that a trace may have read, from a program's function and arguments on, and hashes it by names."""

# A trace follows from code and from the values that it reads: globals, defaults, closures, attributes of objects and of
# their classes. All of these are looked into, whether a trace read them or not, for no record says what Dynamo has read
# (it guards no method of a class). Functions are looked into if they were traced; of others the code itself counts,
# since a trace may tell them apart. Of attributes that are objects only those count whose names occur in traced code: a
# tokenizer beside a model is nobody's input. Names are the same in each process, so equal ones can be compared.

from __future__ import annotations

import builtins
import dataclasses
import enum
import functools
import re
import sys
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextvars import ContextVar
from logging import Logger
from types import (
    BuiltinFunctionType,
    BuiltinMethodType,
    CellType,
    FunctionType,
    MappingProxyType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from compiled_llm.compat.huggingface import class_of_config
from compiled_llm.compat.torch.dynamo import before_dynamo, is_taken_as_constant
from compiled_llm.compat.torch.tensors import dispatch_keys, wrapped_in
from compiled_llm.compilation.kept.fingerprint.code import code_digest, codes_in, digest, imports, names_in
from compiled_llm.model.version.code import CALLED, places_of
from compiled_llm.model.version.module_state import names_read

UNSAID = frozenset(
    {
        *("name_or_path", "_name_or_path", "_commit_hash", "transformers_version", "generation_config", "compiled"),
        *("hf_device_map", "_is_hf_initialized"),
    }
)
"""Attributes that say where a model comes from, or what others do with it; a trace that reads one is not kept."""

BOOKKEEPING = frozenset({"transformers.utils.generic._registered_model_output_types"})
"""Globals in which libraries note what they have seen so far; no value of a trace follows from them."""

_OF_LIBRARIES = frozenset({"torch", "transformers", "compiled_llm", "compiled_llm_ops", "peft"})
_OURS = ("compiled_llm", "compiled_llm_ops")  # what ours return, ``process_state`` has
_CALLED_BY_NAME = (
    *(BuiltinFunctionType, BuiltinMethodType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType),
    *(type(torch.ops.aten.add.Tensor), type(torch.ops.aten.add), type(torch.ops.aten), type(torch.ops)),
)
_OPAQUE = (ContextVar, Logger, type(re.compile("")))
"""Objects of Python's that code calls without looking into them."""

_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), type(...), type(NotImplemented), range})
_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
_LISTS = (list, tuple, set, frozenset, deque)
_MOST = 10_000  # entries of one container, beyond which comparing takes longer than it saves

_KEPT_BY_PYTHON = frozenset(
    {
        *("__doc__", "__dict__", "__weakref__", "__module__", "__qualname__", "__orig_bases__", "__parameters__"),
        *("__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__", "__abstractmethods__"),
        *("_abc_impl", "__static_attributes__", "__firstlineno__", "__type_params__", "__annotations_cache__"),
    }
)


class UnhashableError(Exception):
    """Something cannot be hashed; says what and why."""


def is_plain(value: object) -> bool:
    """Whether a value is equal to another one wherever it is read, and has no parts that can change."""
    if type(value) in _PLAIN or isinstance(value, (*_OF_TORCH, enum.Enum)):
        return True
    return type(value) in (tuple, frozenset) and all(map(is_plain, value))  # type: ignore[call-overload]


class Walk:
    """One walk; ``entries`` are hashes by readable names.

    Attributes:
        looked_up: the names of attributes that hold objects and were looked into; another walk looks into the same.
        reached: the hashes of traced code that was found.
        places: where functions and values were found that a change would replace, for ``ModelVersion.watch_code``.
    """

    def __init__(self, model: nn.Module, traced: Collection[str], words: Collection[str]) -> None:
        """Look into functions whose code is ``traced``, by hash, and into objects that these ``words`` name."""
        self.entries: dict[str, str] = {}
        self.looked_up: set[str] = set()
        self.reached: set[str] = set()
        self.places: list[tuple[Any, str]] = []
        self._traced, self._words = frozenset(traced), frozenset(words)
        self._names: dict[int, str] = {}
        self._taken: Counter[str] = Counter()
        self._held: list[object] = []  # so that no other object gets the id of one
        self._seen: set[int] = set()
        self._opened: set[int] = set()
        self._read: set[tuple[int, str]] = set()
        self._by_kind: dict[type, Callable[[Any, str], str]] = {}
        self._looked: set[tuple[ModuleType, frozenset[str]]] = set()
        self._left: deque[tuple[str, Callable[[], str]]] = deque()
        self._modules = [*model.modules()]
        self._kinds = frozenset(str(type(module)) for module in self._modules)
        self._methods: set[str] = set()
        for name, module in model.named_modules(prefix="model"):
            self._name(module, name)

    # ---- what a caller asks for

    def over(self, roots: Mapping[str, object]) -> None:
        """Walk from ``roots`` on; UnhashableError if something cannot be hashed."""
        for name, value in roots.items():
            self.entries[name] = digest(self.said(value, name))
        while self._left:
            name, describe = self._left.popleft()
            self.entries[name] = digest(describe())
        for kind in {type(module): None for module in self._modules}:
            self.places += places_of([kind], sorted(self._methods & {*dir(kind)} | CALLED))

    def saw(self, value: object) -> bool:
        """Whether a value was found, so that another in its place changes an entry."""
        return id(value) in self._seen

    def opened(self, value: object) -> bool:
        """Whether the parts of a value were hashed."""
        return id(value) in self._opened

    def read(self, module: ModuleType, name: str) -> bool:
        """Whether a module's attribute is an entry."""
        return (id(module), name) in self._read

    # ---- values

    def said(self, value: Any, where: str) -> str:
        """Return what a value is, in words that are the same for equal ones; objects get entries of their own."""
        if type(value) in _PLAIN:
            return f"{type(value).__name__} {value!r}"
        self._see(value)
        kind = type(value)
        if kind not in self._by_kind:
            self._by_kind[kind] = next(
                (found for kinds, found in self._describers if issubclass(kind, kinds)), self._object
            )
        return self._by_kind[kind](value, where)

    @functools.cached_property
    def _describers(self) -> list[tuple[Any, Callable[[Any, str], str]]]:
        return [
            (enum.Enum, lambda value, _: f"{_path_of(type(value))}.{value.name}"),
            (_OF_TORCH, lambda value, _: f"{type(value).__name__} {value}"),
            (Tensor, self._tensor),
            (nn.Module, self._module),
            (FunctionType, self._function),
            (type, self._class),
            (ModuleType, lambda value, _: f"module {value.__name__}"),
            (_CALLED_BY_NAME, lambda value, _: f"{type(value).__name__} {_path_of(value)}"),
            (MethodType, self._around("__func__", "__self__")),
            (functools.partial, self._around("func", "args", "keywords")),
            ((staticmethod, classmethod), self._around("__func__")),
            (property, self._around("fget", "fset")),
            (functools.cached_property, self._around("func")),
            (slice, self._around("start", "stop", "step")),
            (dataclasses.Field, self._field),
            (dict, self._dict),
            (MappingProxyType, self._dict),
            (_LISTS, self._list),
            (PretrainedConfig, self._config),
            (_OPAQUE, lambda value, _: f"a {_path_of(type(value))}"),
        ]

    def _all(self, where: str, *values: object) -> str:
        return f"({', '.join(self.said(value, where) for value in values)})"

    def _around(self, *parts: str) -> Callable[[Any, str], str]:
        """Return what describes an object by some attributes, which are all that it is."""

        def describe(value: Any, where: str) -> str:
            self._open(value)
            return f"{type(value).__name__}{self._all(where, *(getattr(value, part) for part in parts))}"

        return describe

    def _see(self, value: object) -> None:
        if id(value) not in self._seen:
            self._seen.add(id(value))
            self._held.append(value)

    def _open(self, value: object) -> None:
        self._see(value)
        self._opened.add(id(value))

    def _name(self, value: object, name: str) -> str:
        """Return the name of an object, the same each time it is found; further ones of one name are numbered."""
        if id(value) not in self._names:
            self._taken[name] += 1
            number = self._taken[name]
            self._names[id(value)] = name if number == 1 else f"{name} ({number})"
            self._held.append(value)
        return self._names[id(value)]

    def _later(self, value: object, name: str, describe: Callable[[str], str]) -> str:
        """Return the name of an object whose parts are an entry of their own."""
        name = self._name(value, name)
        if id(value) not in self._opened:
            self._open(value)
            self._left.append((name, lambda: describe(name)))
        return name

    def _dict(self, value: Mapping[Any, Any], where: str) -> str:
        if (known := self._again(value, where)) is not None:
            return known
        return self._kind(value, where) + self._entries(value, where)

    def _entries(self, value: Mapping[Any, Any], where: str) -> str:
        items = [(key, entry) for key, entry in value.items() if not self._is_of_other_models(key)]
        return "{" + ", ".join(self._all(where, *item) for item in items) + "}"

    def _list(self, value: Collection[Any], where: str) -> str:
        if not isinstance(value, (tuple, frozenset)) and (known := self._again(value, where)) is not None:
            return known
        self._open(value)
        self._bound(value, where)
        entries: Iterable[str] = (self.said(entry, where) for entry in value)
        entries = sorted(entries) if isinstance(value, (set, frozenset)) else entries
        return f"{self._kind(value, where)}[{', '.join(entries)}]"

    def _again(self, value: Collection[Any], where: str) -> str | None:
        """Return the name of a container that was found before; a container may hold itself."""
        if self.opened(value):
            return f"that of {self._names[id(value)]}"
        self._open(value)
        self._bound(value, where)
        self._name(value, where)
        return None

    @staticmethod
    def _bound(value: Collection[Any], where: str) -> None:
        if len(value) > _MOST:
            raise UnhashableError(f"{where} has {len(value)} entries")

    def _kind(self, value: object, where: str) -> str:
        return "" if type(value).__module__ in ("builtins", "collections") else self._class(type(value), where)

    def _is_of_other_models(self, key: object) -> bool:
        """Whether a table of transformers' has an entry for a class that no module here has."""
        return isinstance(key, str) and key.startswith("<class '") and key not in self._kinds

    def _field(self, field: dataclasses.Field[Any], where: str) -> str:
        factory = None if field.default_factory is dataclasses.MISSING else field.default_factory
        default = None if field.default is dataclasses.MISSING else field.default
        return self._all(where, "field", field.name, default, factory, field.init)

    # ---- functions

    def _function(self, function: FunctionType, where: str) -> str:
        function = before_dynamo(function)
        path, code = _path_of(function), code_digest(function.__code__)
        if is_taken_as_constant(function) and path.partition(".")[0] not in _OURS:
            raise UnhashableError(f"the result of {path} was taken as it was (torch.compiler.assume_constant_result)")
        if code not in self._traced:
            return f"function {path} {code}"
        self.reached |= codes_in(function.__code__)
        return self._later(function, f"function {path}", lambda name: self._parts_of_function(function, name))

    def _parts_of_function(self, function: FunctionType, name: str) -> str:
        self._watch(function, "__code__", "__defaults__", "__kwdefaults__")
        held = [self._cell(cell, name) for cell in function.__closure__ or ()]
        given = self._all(name, function.__defaults__, function.__kwdefaults__, vars(function))
        return "; ".join((code_digest(function.__code__), given, *held, *self._globals(function, name)))

    def _cell(self, cell: CellType, where: str) -> str:
        try:
            value = cell.cell_contents
        except ValueError:
            return "empty"
        self._watch(cell, "cell_contents")
        return self.said(value, f"the closure of {where}")

    def _globals(self, function: FunctionType, name: str) -> Iterator[str]:
        names, found = names_in(function.__code__), function.__globals__
        module = sys.modules.get(str(found.get("__name__")))
        if module is None or vars(module) is not found:  # generated code has a dictionary of its own
            self._open(found)
            yield from (f"{each}: {self.said(found[each], name)}" for each in sorted(names & found.keys()))
        else:
            self._attributes(module, names)
        for each in sorted(names & vars(builtins).keys()):
            yield f"{each}: {self.said(vars(builtins)[each], name)}"
        if imports(function.__code__):
            for each in sorted(_imported(names, found)):
                self._attributes(sys.modules[each], names)

    def _attributes(self, module: ModuleType, names: frozenset[str]) -> None:
        """Make entries of the attributes of a module that code names, and of those in a module that is one."""
        for name in sorted(names & vars(module).keys()):
            if (id(module), name) in self._read:
                if isinstance(value := vars(module)[name], ModuleType):
                    self._attributes_again(value, names)
                continue
            self._read.add((id(module), name))
            self._held.append(module)
            self._watch(module, name)
            value, where = vars(module)[name], f"{module.__name__}.{name}"
            if where not in BOOKKEEPING:
                self.entries[where] = digest(self.said(value, where))
            if isinstance(value, ModuleType):
                self._attributes_again(value, names)

    def _attributes_again(self, module: ModuleType, names: frozenset[str]) -> None:
        if (module, names) not in self._looked:
            self._looked.add((module, names))
            self._attributes(module, names)

    def _watch(self, owner: Any, *names: str) -> None:
        self.places += [(owner, name) for name in names]

    # ---- classes and objects

    def _class(self, kind: type, where: str) -> str:
        if kind.__module__ == "builtins" or kind.__module__.partition(".")[0] in sys.stdlib_module_names:
            self._open(kind)  # what it is follows from Python's version
            return f"class {_path_of(kind)}"
        return self._later(kind, f"class {_path_of(kind)}", lambda name: self._parts_of_class(kind, name))

    def _parts_of_class(self, kind: type, name: str) -> str:
        bases = [self.said(base, name) for base in (type(kind), *kind.__mro__[1:])]
        self._watch(kind, *(member for member, value in vars(kind).items() if self._counts(member, value)))
        members = sorted(vars(kind).items())
        said = (f"{member}: {self._member(member, value, name)}" for member, value in members if _is_said(member))
        return "; ".join((*bases, *said))

    def _counts(self, member: str, value: object) -> bool:
        """Whether a member of a class is plain, or was traced: another one in its place makes another trace."""
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if not isinstance(function, FunctionType):
            return _is_said(member) and is_plain(value)
        if traced := code_digest(before_dynamo(function).__code__) in self._traced:
            self._methods.add(member)
        return traced

    def _member(self, member: str, value: object, name: str) -> str:
        if isinstance(value, (FunctionType, staticmethod, classmethod, property, functools.cached_property)):
            return self.said(value, name)
        return self._value(member, value, name)

    def _value(self, attribute: str, value: object, where: str) -> str:
        """Return what an attribute is; of an object only that there is one, unless traced code may read it."""
        if is_plain(value) or isinstance(value, (FunctionType, MethodType, functools.partial)):
            return self.said(value, f"{where}.{attribute}")
        if attribute not in self._words and not _is_dunder(attribute):
            return "an object"
        self.looked_up.add(attribute)
        return self.said(value, f"{where}.{attribute}")

    def _object(self, value: Any, where: str) -> str:
        kind = type(value)
        if isinstance(wrapped := getattr(value, "__wrapped__", None), FunctionType):  # a cache around a function
            self._open(value)
            return self._all(where, _path_of(kind), wrapped)
        origin = kind.__module__.partition(".")[0]
        if origin in sys.stdlib_module_names or origin == "torch":
            return f"a {_path_of(kind)}"  # its parts are nobody's: a guard that reads one is not covered
        if origin not in _OF_LIBRARIES:
            raise UnhashableError(f"{where} is an object of {_path_of(kind)}")
        return self._later(value, f"the {kind.__name__} of {where}", lambda name: self._parts_of(value, name))

    def _parts_of(self, value: Any, name: str) -> str:
        slots = (slot for base in type(value).__mro__ for slot in _slots_of(base) if hasattr(value, slot))
        held = {**{slot: getattr(value, slot) for slot in slots}, **getattr(value, "__dict__", {})}
        said = (f"{attribute}: {self._value(attribute, entry, name)}" for attribute, entry in held.items())
        return "; ".join((self.said(type(value), name), *said))

    def _config(self, config: PretrainedConfig, where: str) -> str:
        name = self._name(config, where)
        if not self.opened(config):
            self._open(config)
            kind = self.said(class_of_config(config), name)
            for base in {*type(config).__mro__} - {*class_of_config(config).__mro__}:
                self._open(base)  # of ours: a thread reads other implementations than the one that it names
            read = {entry: value for entry, value in vars(config).items() if entry not in UNSAID}
            for entry, value in read.items():
                self.entries[f"{name}.{entry}"] = digest(self.said(value, f"{name}.{entry}"))
            self.entries[name] = digest(f"{kind} {list(read)}")
        return name

    # ---- modules and tensors

    def _module(self, module: nn.Module, where: str) -> str:
        return self._later(module, where, lambda name: self._parts_of_module(module, name))

    def _parts_of_module(self, module: nn.Module, name: str) -> str:
        held = vars(module)
        for each in {"_modules", "_parameters", "_buffers", *_HOOKS} & held.keys():
            self._open(held[each])
        attributes = (f"{each}: {self._value(each, held[each], name)}" for each in names_read(module) if _is_said(each))
        hooks = (f"{each}: {self._entries(held[each], f'{name}.{each}')}" for each in _HOOKS if held.get(each))
        tensors = (f"{each}: {self.said(entry, f'{name}.{each}')}" for each, entry in _tensors_of(module))
        children = (f"{each}: {self.said(child, f'{name}.{each}')}" for each, child in module._modules.items())
        kind = self.said(type(module), name)
        return "; ".join((kind, f"training: {module.training}", *attributes, *hooks, *tensors, *children))

    def _tensor(self, tensor: Tensor, where: str) -> str:
        """Describe a tensor but for its values and its address; one that was found before by its name."""
        if (known := self._names.get(id(tensor))) is not None:
            return f"that of {known}"
        self._open(tensor)
        self._name(tensor, where)
        layout = (tensor.dtype, tensor.device, tuple(tensor.shape), tensor.stride(), tensor.requires_grad)
        marks = sorted(name for name in vars(tensor) if name.startswith("_dynamo") and name.endswith("_indices"))
        self._see(type(tensor))
        kind = _path_of(type(tensor)) if _is_torchs(tensor) else self.said(type(tensor), where)
        said = f"{kind} {layout} {dispatch_keys(tensor)} {marks}"
        if (parts := wrapped_in(tensor)) is None:
            return said
        inner = (f"{name}: {self.said(part, f'{where}.{name}')}" for name, part in parts[0].items())
        return f"{said} of {', '.join(inner)}; {self.said(parts[1], where)}"


_HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs"),
    *("_forward_hooks_always_called", "_backward_hooks", "_backward_pre_hooks"),
)


def _is_torchs(value: object) -> bool:
    return type(value).__module__.partition(".")[0] == "torch"


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor | None]]:
    yield from module._parameters.items()
    yield from module._buffers.items()


def _path_of(value: Any) -> str:
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    return f"{module}.{name or getattr(value, '__name__', None) or value}"


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _is_said(name: str) -> bool:
    return name not in UNSAID and name not in _KEPT_BY_PYTHON and not name.startswith("___")  # Dynamo's notes


def _slots_of(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return tuple(slot for slot in ((slots,) if isinstance(slots, str) else slots) if slot not in _KEPT_BY_PYTHON)


def _imported(names: Iterable[str], found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of modules that code with these ``names`` may import, as globals ``found`` say from where."""
    package = str(found.get("__package__") or "")
    parents = [package.rsplit(".", up)[0] for up in range(package.count(".") + 1)] if package else []
    for name in names:
        for whole in (name, *(f"{parent}.{name}" for parent in parents)):
            if whole in sys.modules and whole.partition(".")[0] not in sys.stdlib_module_names:
                yield whole
