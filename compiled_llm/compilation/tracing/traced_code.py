"""Finds traced Python code that Dynamo does not guard: methods of classes, functions of torch."""

# Dynamo guards functions that it finds in the globals of traced code, and attributes of modules, but not what a class
# defines. Kernel libraries replace methods such as ``Qwen3MLP.forward``.

from __future__ import annotations

import inspect
import weakref
from collections.abc import Collection, Iterator
from types import CodeType, FunctionType

import torch
from torch import fx

from compiled_llm.compat.torch.dynamo import traced_code
from compiled_llm.model.version.code import Place, places_of
from compiled_llm.model.version.model_version import ModelVersion

_TORCH = (torch, torch.nn.functional)


class TracedCodeWatch:
    """A watch over the places where Dynamo has found the functions in a graph; called like a pass, inside a backend."""

    # It only borrows the version of the model. Dynamo holds a backend for as long as the function that it compiled,
    # whose owner knows the version: a cycle through Dynamo, where Python's garbage collector does not look.

    def __init__(self, version: ModelVersion) -> None:
        """Watch for ``version``, which is there whenever a graph is compiled."""
        self._version = weakref.ref(version)

    def __call__(self, graph: fx.Graph) -> None:
        version, codes = self._version(), traced_code()
        assert version is not None
        methods = (place for kind in version.classes() for place in places_of([kind], _methods(kind, codes)))
        version.watch_code([*methods, *_functions(graph, codes)])


def _methods(kind: type, codes: Collection[CodeType]) -> set[str]:
    return {name for base in kind.__mro__ for name, value in vars(base).items() if _code_of(value) in codes}


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
