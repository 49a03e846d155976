"""Traced Python code that Dynamo does not guard: methods of classes, functions of torch.

Dynamo guards functions that it finds in the globals of traced code, and attributes of modules, but not what a class
defines. Kernel libraries replace methods such as ``Qwen3MLP.forward``.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import fx, nn

from compiled_llm.compat.torch.dynamo import traced_code
from compiled_llm.model.version.module_tree import same

_ALWAYS = frozenset({"__call__", "forward"})
_TORCH = (torch, torch.nn.functional)

Place = tuple[type | ModuleType, str]
"""A class or a module, and a name in it."""


class TracedCode:
    """The places where tracing has found functions, and the functions it found there."""

    def __init__(self, model: weakref.ref[Any]) -> None:
        self._model = model
        self._lookups: dict[Place, Callable[[str], object]] = {}
        self._known: list[object] = []

    def note(self, graph: fx.Graph) -> None:
        """Remember the code of a graph that Dynamo has just made; called like a pass, inside a backend."""
        model, codes = self._model(), traced_code()
        classes = set() if model is None else set(map(type, model.modules()))
        for place in (*_methods(classes, codes), *_functions(graph, codes)):
            if place not in self._lookups:
                owner, name = place
                self._lookups[place] = vars(owner).get
                self._known.append(vars(owner).get(name))

    def valid(self) -> bool:
        """Whether all of it is still the traced code."""
        return same(self._known, [look_up(name) for (_, name), look_up in self._lookups.items()])


def _methods(classes: Iterable[type[nn.Module]], codes: Collection[CodeType]) -> Iterator[Place]:
    """Yield the places where the lookup of a traced method ends, and those where a new method would hide it."""
    for kind in classes:
        names = {name for base in kind.__mro__ for name, value in vars(base).items() if _code_of(value) in codes}
        for name in names | _ALWAYS:
            for base in kind.__mro__:
                yield base, name
                if name in vars(base):
                    break


def _functions(graph: fx.Graph, codes: Collection[CodeType]) -> Iterator[Place]:
    """Yield the places of torch's functions that were traced, or that the graph calls."""
    called = {id(node.target) for node in graph.nodes if node.op == "call_function"}
    for module in _TORCH:
        for name, value in vars(module).items():
            if id(value) in called or _code_of(value) in codes:
                yield module, name


def _code_of(value: object) -> CodeType | None:
    function = value.fget if isinstance(value, property) else value
    function = function.__func__ if isinstance(function, (staticmethod, classmethod)) else function
    function = inspect.unwrap(function) if isinstance(function, FunctionType) else None  # decorators share their code
    return function.__code__ if isinstance(function, FunctionType) else None
