"""What modules do otherwise in training mode: the code of their classes says where it reads ``training``."""

# Most of it does nothing: a dropout of 0, a checkpoint that is off. Such a read stands beside what it depends on, in
# ``F.dropout(x, p=self.p, training=self.training)``, ``0.0 if not self.training else self.p``, or ``self.jitter and
# self.training``; all other reads count as doing something. So programs need no modules in evaluation mode, and the
# flag stays the user's: nobody sees it change.

from __future__ import annotations

import ast
import functools
import inspect
import operator
import textwrap
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType
from typing import Any, NamedTuple

from torch import nn

from compiled_llm.compat.cache_names import STATE_CACHE_NAMES
from compiled_llm.model.version.functions import names_in

CHECKPOINTING = "gradient_checkpointing"
"""HuggingFace's flag of layers that use no cache in training mode, and compute again what gradients need."""

FLAGS = frozenset({"training", CHECKPOINTING})
"""What modules may change between two calls of one program: it is called if nothing follows from them."""

_SETTING = frozenset({"train", "eval"})
_PLAIN = (
    *(ast.Attribute, ast.BoolOp, ast.Compare, ast.Constant, ast.Name, ast.UnaryOp),
    *(ast.boolop, ast.cmpop, ast.expr_context, ast.unaryop),
)
"""What a condition may consist of: to find out whether it holds must call nothing."""


_TOLD = frozenset({*(f"{name} is None" for name in STATE_CACHE_NAMES), "self.config.use_cache"})
"""What HuggingFace's models with states ask before they keep none in training mode; our calls say that they do."""


class Read(NamedTuple):
    """A place where a class's code reads ``training``."""

    depends_on: str  # the attribute that it stands beside, such as ``"attention_dropout"``; empty if there is none
    idle: Callable[[nn.Module], bool]  # whether the flag does nothing there for a module


class Difference(NamedTuple):
    """A module that acts otherwise in training mode, by name, and by what."""

    module: str
    kind: str
    attribute: str
    value: object

    @property
    def checkpoints(self) -> bool:
        """Whether it is a layer whose gradients are checkpointed, and nothing else."""
        return self.attribute == CHECKPOINTING

    def __str__(self) -> str:
        reason = f"{self.attribute}={self.value!r}" if self.attribute else "its code reads `training`"
        return f"{self.module or 'the model itself'} ({self.kind}: {reason})"


def training_difference(modules: Iterable[tuple[str, nn.Module]]) -> Difference | None:
    """Return the first named module that acts otherwise in its training mode; those that only checkpoint come last."""
    found = (difference(name, module) for name, module in modules if module.training)
    differences = sorted(filter(None, found), key=lambda each: each.checkpoints)
    return differences[0] if differences else None


def difference(name: str, module: nn.Module) -> Difference | None:
    """Return what a module does otherwise in training mode than in evaluation mode, or None."""
    for read in reads_of(type(module)):  # type: ignore[arg-type]
        if not read.idle(module):
            value = _value_of(module, read.depends_on) if read.depends_on else None
            return Difference(name, type(module).__name__, read.depends_on, value)
    return None


@functools.lru_cache(maxsize=1024)  # of classes that may come and go
def reads_of(kind: type[nn.Module]) -> tuple[Read, ...]:
    """Return where the code of a class and of those that it derives from reads ``training``."""
    bases = kind.__mro__[: kind.__mro__.index(nn.Module)]
    methods = {name: value for base in reversed(bases) for name, value in vars(base).items() if name not in _SETTING}
    return tuple(read for method in methods.values() for function in _functions(method) for read in _reads(function))


def _functions(method: object) -> Iterator[FunctionType]:
    """Yield the function of a class's attribute, and those that its decorators wrap."""
    function: Any = method.fget if isinstance(method, property) else method
    function = method.__func__ if isinstance(method, staticmethod) else function
    while isinstance(function, FunctionType):
        yield function
        function = getattr(function, "__wrapped__", None)


def _reads(function: FunctionType) -> Iterator[Read]:
    if "training" not in names_in(function.__code__):
        return
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function.__code__)))
    except (OSError, SyntaxError):  # typed into an interpreter, or part of an expression
        yield Read("", _never)
        return
    parents = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "training" and isinstance(node.ctx, ast.Load):
            yield _read(node, parents, function.__code__.co_varnames[:1])


def _read(node: ast.expr, parents: dict[ast.AST, ast.AST], first: tuple[str, ...]) -> Read:
    inner, outer = node, parents[node]
    while isinstance(outer, ast.UnaryOp):
        inner, outer = outer, parents[outer]
    for depends_on, condition in _conditions(inner, outer, parents):
        if ast.unparse(depends_on) in _TOLD:
            return Read("", _always)
        asks_module_alone = _names_in(depends_on) == _names_in(condition) == {*first}
        if asks_module_alone and all(map(_is_plain, ast.walk(condition))):
            return Read(_attribute(depends_on), _function_of(condition, first[0]))
    return Read("", _never)


def _names_in(expression: ast.expr) -> set[str]:
    return {part.id for part in ast.walk(expression) if isinstance(part, ast.Name)} - {"getattr"}


def _is_plain(part: ast.AST) -> bool:
    return isinstance(part, _PLAIN) or (isinstance(part, ast.Call) and ast.unparse(part.func) == "getattr")


def _conditions(
    inner: ast.expr, outer: ast.AST, parents: dict[ast.AST, ast.AST]
) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield what a read of ``training`` stands beside, and the condition under which the flag does nothing."""
    if isinstance(outer, ast.BoolOp):
        for other in outer.values:
            if other is not inner:
                yield other, (ast.UnaryOp(ast.Not(), other) if isinstance(outer.op, ast.And) else other)
    elif isinstance(outer, ast.IfExp) and outer.test is inner:
        for one, other in ((outer.body, outer.orelse), (outer.orelse, outer.body)):
            yield one, ast.Compare(one, [ast.Eq()], [other])
    call = parents[outer] if isinstance(outer, ast.keyword) else outer
    if isinstance(call, ast.Call) and "dropout" in ast.unparse(call.func):
        for p in [*call.args[1:], *(keyword.value for keyword in call.keywords if keyword.arg == "p")]:
            yield p, ast.Compare(p, [ast.Eq()], [ast.Constant(0)])


def _function_of(condition: ast.expr, argument: str) -> Callable[[nn.Module], bool]:
    text = ast.unparse(ast.fix_missing_locations(condition))
    evaluate = eval(f"lambda {argument}: {text}", {"getattr": getattr})

    def idle(module: nn.Module) -> bool:
        try:
            return bool(evaluate(module))
        except (AttributeError, TypeError):
            return False

    return idle


def _always(module: nn.Module) -> bool:
    return True


def _never(module: nn.Module) -> bool:
    return False


def _attribute(node: ast.expr) -> str:
    """Return the attribute of the module in an expression, without the module's own name."""
    named = (part.args[1] for part in ast.walk(node) if isinstance(part, ast.Call))
    if isinstance(name := next(named, None), ast.Constant):
        return str(name.value)
    found = next((part for part in ast.walk(node) if isinstance(part, ast.Attribute)), None)
    return "" if found is None else ast.unparse(found).partition(".")[2]


def _value_of(module: nn.Module, path: str) -> object:
    value: object = operator.attrgetter(path)(module)
    return value
