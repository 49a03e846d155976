"""Walks over all that a trace may have read, from a program's function and arguments on, and hashes it by names."""

# A trace follows from code and from the values that it reads: globals, defaults, closures, attributes of objects and of
# their classes. All of these are looked into, whether a trace read them or not, for no record says what Dynamo has read
# (it guards no method of a class). Functions are looked into if they were traced; of others the code itself counts,
# since a trace may tell them apart. Of attributes that are objects only those count whose names occur in traced code: a
# tokenizer beside a model is nobody's input. Names are the same in each process, so equal ones can be compared.

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Collection, Mapping
from logging import Logger
from types import (
    BuiltinFunctionType,
    BuiltinMethodType,
    FunctionType,
    MappingProxyType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from compiled_llm.compilation.kept.fingerprint.classes import describe_class
from compiled_llm.compilation.kept.fingerprint.code import digest
from compiled_llm.compilation.kept.fingerprint.containers import around, describe_container
from compiled_llm.compilation.kept.fingerprint.functions import describe_function
from compiled_llm.compilation.kept.fingerprint.modules import describe_config, describe_module, describe_tensor
from compiled_llm.compilation.kept.fingerprint.objects import (
    describe_called,
    describe_enum,
    describe_object,
)
from compiled_llm.compilation.kept.fingerprint.plain import OF_TORCH, is_dunder, path_of
from compiled_llm.compilation.kept.fingerprint.visit import Describers, Visit
from compiled_llm.model.version.code import CALLED, places_of
from compiled_llm.model.version.contents import LISTS

_CALLED_BY_NAME = (
    *(BuiltinFunctionType, BuiltinMethodType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType),
    *(type(torch.ops.aten.add.Tensor), type(torch.ops.aten.add), type(torch.ops.aten), type(torch.ops)),
)
_DESCRIBERS: Describers = [
    (enum.Enum, describe_enum),
    (OF_TORCH, lambda visit, value, where: f"{type(value).__name__} {value}"),
    (Tensor, describe_tensor),
    (nn.Module, describe_module),
    (FunctionType, describe_function),
    (type, describe_class),
    (ModuleType, lambda visit, value, where: f"module {value.__name__}"),
    (_CALLED_BY_NAME, describe_called),
    (MethodType, around("__func__", "__self__")),
    (functools.partial, around("func", "args", "keywords")),
    ((staticmethod, classmethod), around("__func__")),
    (property, around("fget", "fset")),
    (functools.cached_property, around("func")),
    (slice, around("start", "stop", "step")),
    ((dict, MappingProxyType, *LISTS), describe_container),
    (PretrainedConfig, describe_config),
    (re.Pattern, around("pattern", "flags")),
    (Logger, lambda visit, value, where: f"a {path_of(type(value))}"),  # nobody looks into one
    (object, describe_object),
]
_LOOKUPS = CALLED | {"__getattr__", "__getattribute__"}


class Walk(Visit):
    """A walk from a model on."""

    def __init__(self, model: nn.Module, traced: Collection[str], words: Collection[str]) -> None:
        """Look into functions whose code is ``traced``, by hash, and into objects that these ``words`` name."""
        self._classes = list(dict.fromkeys(map(type, model.modules())))
        super().__init__(_DESCRIBERS, traced, words, set(map(str, self._classes)))
        for name, module in model.named_modules(prefix="model"):
            self.name(module, name)

    def over(self, roots: Mapping[str, object]) -> None:
        """Walk from ``roots`` on; UnhashableError if something cannot be hashed."""
        for name, value in {**roots, "methods of tensors": nn.Parameter}.items():
            self.entries[name] = digest(self.describe(value, name))
        self.finish()
        self._watch_lookups()

    def _watch_lookups(self) -> None:
        """Watch where methods and attributes are looked up, since a new one may hide the one that was traced."""
        for kind in dict.fromkeys([*self._classes, *(kind for kind, _ in self.objects)]):
            self.places += places_of([kind], sorted(self.methods & {*dir(kind)} | _LOOKUPS))
        of_tensors = {*dir(nn.Parameter)}
        operators = {name for name in of_tensors if is_dunder(name)}
        self.places += places_of([nn.Parameter], sorted(self.named & of_tensors | operators))
        for kind, attributes in self.objects:
            self.watch(attributes, sorted(self.named & {*dir(kind)} - attributes.keys()))
