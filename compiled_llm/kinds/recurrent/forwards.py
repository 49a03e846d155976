"""How recurrent layers of transformers reach states that are not in its caches."""

# A layer's ``forward`` hands its states to the cache (``Cache.update_conv_state``, ``update_recurrent_state``), and
# computes by functions of its module's globals. These are padded, or raise on packed rows (``cu_seqlens``), and none
# gets the cache. So a second ``forward`` is made from the source of the first one, in which the cache's methods of
# ``FUNCTIONS`` stand in the place of these functions; everything else is HuggingFace's code, and its globals are its
# module's own. A class of the layer's name chooses the second one where the cache is one of ours, and the first one
# anywhere else, so that nothing changes for other callers, other models and other threads.
# Without it, models with recurrent layers are refused. It ends when transformers computes packed rows without
# flash-linear-attention and mamba-ssm, and its caches may bring their own functions.
# ``tests/kinds/test_recurrent_forwards.py`` names what no longer fits.

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch import nn

FUNCTIONS = {
    "causal_conv1d_fn": "causal_conv1d",
    "torch_chunk_gated_delta_rule": "delta_rule",
    "chunk_kimi_delta_attention": "delta_rule",
    "mamba_selective_scan": "selective_scan",
    "mamba2_chunk_scan": "chunk_scan",
}
"""Functions of HuggingFace's modules, and the cache's methods that stand in for them."""
# Those of a single token are not among them: layers call them for rows whose states the cache hands out.
KEPT = frozenset({"update_conv_state", "update_recurrent_state"})  # the cache's methods by which layers keep states


class StatesNotFoundError(Exception):
    """A layer keeps states in a way that is not known."""


def keeps_states(layer: type[nn.Module]) -> bool:
    """Whether a class's ``forward`` hands states to the cache."""
    code = getattr(inspect.unwrap(layer.forward), "__code__", None)
    return code is not None and bool(KEPT.intersection(code.co_names))


def own_class(layer: type[nn.Module]) -> type[nn.Module] | None:
    """Return the class that ``with_packed_rows`` was given; None if it has not made this one."""
    return layer.__bases__[0] if layer in _made.values() else None


_made: dict[tuple[type[nn.Module], type], type[nn.Module]] = {}
"""The classes that were made, so that all layers of a class share one, and its compiled code."""


def with_packed_rows(layer: type[nn.Module], states: type) -> type[nn.Module]:
    """Return a class of a layer's name whose ``forward`` lets ``states`` compute; StatesNotFoundError if none can."""
    if (layer, states) in _made:
        return _made[layer, states]
    argument, packed = packed_forward(layer)
    place = [*inspect.signature(layer.forward).parameters].index(argument)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = kwargs.get(argument) if len(args) < place else args[place - 1]
        return packed(self, *args, **kwargs) if isinstance(given, states) else layer.forward(self, *args, **kwargs)

    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:  # noqa: N807
        state: tuple[Any, ...] = layer.__reduce_ex__(self, protocol)[2:]  # type: ignore[assignment]
        return object.__new__, (layer,), *state  # what is copied or saved is a layer of its own class

    own = {"forward": forward, "__reduce_ex__": __reduce_ex__, "__doc__": layer.__doc__}
    own |= {"__module__": layer.__module__, "__qualname__": layer.__qualname__}
    made: type[nn.Module] = type(layer.__name__, (layer,), own)
    _made[layer, states] = made
    return made


def packed_forward(layer: type[nn.Module]) -> tuple[str, Callable[..., Any]]:
    """Return a ``forward``'s name for the cache, and one that calls its methods; errors as of ``with_packed_rows``."""
    written = _written(layer.forward)
    name = f"{layer.__module__}.{layer.__qualname__}"
    if written.__code__.co_freevars:
        raise StatesNotFoundError(f"{name}: forward has variables of functions around it")
    tree = ast.parse(textwrap.dedent(inspect.getsource(written)))
    (function,) = tree.body
    assert isinstance(function, ast.FunctionDef)
    caches = _Caches(*(argument.arg for argument in ast.walk(function.args) if isinstance(argument, ast.arg)))
    caches.visit(function)
    if len(caches.found) != 1:
        raise StatesNotFoundError(f"{name}: no argument of forward, or several, are given states: {caches.found}")
    (argument,) = caches.found
    calls = _Calls(argument)
    calls.visit(function)
    if not calls.count:
        raise StatesNotFoundError(f"{name}: forward calls none of {', '.join(FUNCTIONS)}")
    return argument, _compiled(tree, function, written)


class _Caches(ast.NodeVisitor):
    """The arguments whose methods are given states, in a syntax tree."""

    def __init__(self, *arguments: str) -> None:
        self._arguments = arguments
        self.found: set[str] = set()

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr in KEPT and isinstance(node.value, ast.Name) and node.value.id in self._arguments:
            self.found.add(node.value.id)
        self.generic_visit(node)


class _Calls(ast.NodeTransformer):
    """A transformer that puts methods of the cache in the place of functions."""

    def __init__(self, argument: str) -> None:
        self._argument = argument
        self.count = 0

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS:
            self.count += 1
            of_cache = ast.Name(self._argument, ast.Load())
            node.func = ast.copy_location(ast.Attribute(of_cache, FUNCTIONS[node.func.id], ast.Load()), node.func)
            ast.copy_location(of_cache, node.func)
        return node


def _compiled(tree: ast.Module, function: ast.FunctionDef, written: FunctionType) -> FunctionType:
    """Return the function of a tree, with the globals and defaults, and for tracebacks the lines, of ``written``."""
    function.decorator_list = []
    arguments = function.args
    arguments.defaults, arguments.kw_defaults = [], [None] * len(arguments.kwonlyargs)
    ast.increment_lineno(tree, written.__code__.co_firstlineno - 1)
    # Annotations stay strings: they may name what is imported for type checkers alone.
    code = compile(tree, written.__code__.co_filename, "exec", annotations.compiler_flag, True)
    made: dict[str, Any] = {}
    exec(code, written.__globals__, made)
    packed: FunctionType = made[function.name]
    packed.__defaults__, packed.__kwdefaults__ = written.__defaults__, written.__kwdefaults__
    return packed


def _written(forward: Callable[..., Any]) -> FunctionType:
    """Return the function as its author wrote it, without decorators that say what they wrap."""
    found = inspect.unwrap(forward)
    assert isinstance(found, FunctionType)
    return found
