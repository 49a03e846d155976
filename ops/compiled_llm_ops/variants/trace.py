"""Traces a variant's functions by ``torch.fx``, and refuses what no kernel can compute, with its line."""

from __future__ import annotations

import linecache
import operator
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.proxy import GraphAppendingTracer, TraceError

from compiled_llm_ops.variants.expressions import (
    INPUTS,
    READ_AS,
    Expression,
    OperationList,
    Type,
    VariantTensor,
)

_ARITHMETIC = {
    operator.add: "add", torch.add: "add", "add": "add",
    operator.sub: "sub", torch.sub: "sub", torch.subtract: "sub", "sub": "sub",
    operator.mul: "mul", torch.mul: "mul", torch.multiply: "mul", "mul": "mul",
    torch.minimum: "minimum", "minimum": "minimum", torch.maximum: "maximum", "maximum": "maximum",
}  # fmt: skip
_DIVISIONS = {operator.truediv: "div", torch.div: "div", torch.divide: "div", torch.true_divide: "div", "div": "div"}
_OF_INTEGERS = {
    operator.floordiv: "floordiv", torch.floor_divide: "floordiv", "floor_divide": "floordiv",
    operator.mod: "mod", torch.remainder: "mod", "remainder": "mod",
}  # fmt: skip
_COMPARISONS = {
    **{function: function.__name__ for function in (operator.lt, operator.le, operator.gt, operator.ge)},
    **{function: function.__name__ for function in (operator.eq, operator.ne)},
    **{getattr(torch, name): name for name in ("lt", "le", "gt", "ge", "eq", "ne")},
    **{name: name for name in ("lt", "le", "gt", "ge", "eq", "ne")},
}
_LOGIC = {
    operator.and_: "and", torch.logical_and: "and", "logical_and": "and", torch.bitwise_and: "and",
    operator.or_: "or", torch.logical_or: "or", "logical_or": "or", torch.bitwise_or: "or",
    operator.xor: "xor", torch.logical_xor: "xor", "logical_xor": "xor", torch.bitwise_xor: "xor",
}  # fmt: skip
_NOT = {operator.invert, torch.logical_not, "logical_not", torch.bitwise_not}
_SIGNS = {operator.neg: "neg", torch.neg: "neg", "neg": "neg", operator.abs: "abs", torch.abs: "abs", "abs": "abs"}
_FUNCTIONS = ("exp", "exp2", "log", "log2", "sqrt", "tanh", "sigmoid")
_OF_FLOATS = {
    **{getattr(torch, name): name for name in _FUNCTIONS},
    **{name: name for name in _FUNCTIONS},
    torch.nn.functional.tanh: "tanh",
    torch.nn.functional.sigmoid: "sigmoid",
}
_WHERE = {torch.where, "where"}
_CLAMPS = {torch.clamp, torch.clip, "clamp", "clip"}

CAN = (
    "a variant has arithmetic, comparisons, &, | and ~ of them, torch.where, minimum, maximum, clamp, abs, "
    "exp, exp2, log, log2, sqrt, tanh, sigmoid, and entries of its tensors"
)


class UserLine(NamedTuple):
    """Where a call stands in the user's function."""

    path: str
    line: int

    def __str__(self) -> str:
        source = linecache.getline(self.path, self.line).strip()
        return f"{self.path}:{self.line}" + (f": `{source}`" if source else "")


class _Refused(Exception):  # noqa: N818
    """An operation has no kernel; its place follows."""


class _Tracer(GraphAppendingTracer):
    """A tracer that notes where each operation stands."""

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        node.meta["place"] = _place_of_caller()
        return node

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, torch.Tensor):
            raise _Refused(
                f"a tensor of shape {tuple(a.shape)} that is no argument; name it in tensors=, and take it as one"
            )
        return super().create_arg(a)


def _place_of_caller() -> UserLine | None:
    """Return the innermost place that is neither PyTorch's nor this file's."""
    for frame, line in traceback.walk_stack(None):
        path = frame.f_code.co_filename
        if path != __file__ and f"{_TORCH}/" not in path:
            return UserLine(path, line)
    return None


_TORCH = torch.__path__[0]


def traced(
    variant: str, argument: str, function: Callable[..., Any], tensors: Sequence[VariantTensor], returns: Type
) -> Expression:
    """Return what a function computes of inputs by position and tensors by name; ValueError if no kernel can."""
    said = f"register_variant: {argument} of {variant!r}"
    graph = fx.Graph()
    tracer = _Tracer(graph)
    names = [name for name in INPUTS if argument == "logits" or name != "logit"]

    def proxy(name: str) -> fx.Proxy:
        return fx.Proxy(tracer.create_node("placeholder", name, (), {}), tracer)

    try:
        result = function(*map(proxy, names), **{tensor.name: proxy(tensor.name) for tensor in tensors})
    except Exception as error:
        raise ValueError(f"{said} cannot be traced{_at(_place_in(error))}: {_reason(error)}; {CAN}") from error
    tracing = _Tracing(names, {tensor.name: tensor for tensor in tensors})
    for node in graph.nodes:
        try:
            tracing.visit(node)
        except _Refused as error:
            raise ValueError(f"{said}{_at(node.meta['place'])}: {error}; {CAN}") from None
    try:
        return tracing.result(result.node if isinstance(result, fx.Proxy) else result, returns)
    except _Refused as error:
        raise ValueError(f"{said} returns {error}") from None


def _at(place: UserLine | None) -> str:
    return "" if place is None else f" at {place}"


def _place_in(error: Exception) -> UserLine | None:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename != __file__ and f"{_TORCH}/" not in frame.filename]
    return UserLine(own[-1].filename, own[-1].lineno or 0) if own else None


def _reason(error: Exception) -> str:
    if isinstance(error, _Refused):
        return str(error)
    if isinstance(error, TraceError):
        return (
            "Python's if, and, or, not, max, min and chained comparisons look at numbers that only a kernel knows; "
            "use torch.where, &, |, ~, torch.maximum and torch.minimum"
        )
    hint = "torch.minimum and torch.maximum take numbers as torch.clamp(x, max=...) and torch.clamp(x, min=...); "
    hint = hint if "imum()" in str(error) else ""
    hint = "use torch's functions in place of math's; " if "must be real number" in str(error) else hint
    return f"{hint}{type(error).__name__}: {str(error).partition(chr(10))[0]}"


class _Tracing:
    """A maker of operations of the nodes of a graph."""

    def __init__(self, inputs: Sequence[str], tensors: Mapping[str, VariantTensor]) -> None:
        self._operations = OperationList()
        self._inputs = inputs
        self._tensors = tensors
        self._numbers: dict[fx.Node, int] = {}

    def result(self, value: Any, returns: Type) -> Expression:
        if not isinstance(value, (fx.Node, bool, int, float)):
            raise _Refused(f"{type(value).__name__}; it must return {_WORDS[returns]}")
        number = self._number(value)
        found = self._operations.type_of(number)
        if (found == "bool") != (returns == "bool"):
            raise _Refused(f"{_WORDS[found]}; it must return {_WORDS[returns]}")
        return self._operations.ending_with(self._as(number, returns))

    def visit(self, node: fx.Node) -> None:
        """Make operations of a node, whose operands have been visited."""
        if node.op == "placeholder":
            if node.target in self._inputs:
                name = str(node.target)
                self._numbers[node] = self._operations.add("input", (), INPUTS[name], name)
            return
        target: Any = node.target
        if target is operator.getitem:
            self._numbers[node] = self._read(*node.args)
        else:
            self._numbers[node] = self._computed(target, node.args, dict(node.kwargs))

    def _computed(self, target: Any, args: tuple[Any, ...], options: dict[str, Any]) -> int:
        if target in _CLAMPS:
            return self._clamped(*args, **options)
        if options:
            raise _Refused(f"{_said(target)} with {', '.join(options)}")
        operands = [self._number(argument) for argument in args]
        if target in _ARITHMETIC:
            return self._alike(_ARITHMETIC[target], *operands)
        if target in _DIVISIONS:
            return self._of_floats("div", *operands)
        if target in _OF_INTEGERS:
            return self._of_integers(_OF_INTEGERS[target], *operands)
        if target in _COMPARISONS:
            return self._alike(_COMPARISONS[target], *operands, result="bool")
        if target in _LOGIC:
            return self._of_bools(_LOGIC[target], *operands)
        if target in _NOT:
            return self._of_bools("not", *operands)
        if target in _SIGNS:
            return self._alike(_SIGNS[target], *operands)
        if target in _OF_FLOATS:
            return self._of_floats(_OF_FLOATS[target], *operands)
        if target in _WHERE and len(operands) == 3:
            return self._where(*operands)
        if target is operator.pow or target in (torch.pow, "pow"):
            return self._power(*operands)
        if target is operator.pos:
            return operands[0]
        if target == "float":
            return self._as(operands[0], "float")
        raise _Refused(f"no kernel has {_said(target)}")

    def _number(self, value: Any) -> int:
        """Return the number of an operand: a node, or a constant."""
        if isinstance(value, fx.Node):
            if value not in self._numbers:
                tensor = self._tensors[str(value.target)]
                if tensor.axes != ("query",):
                    raise _Refused(f"{tensor.name} is a tensor; read entries of it, {_reading(tensor)}")
                self._numbers[value] = self._operations.add("read", (), READ_AS[tensor.dtype], tensor.name)
            return self._numbers[value]
        if isinstance(value, bool):
            return self._operations.add("constant", (), "bool", value)
        if isinstance(value, int):
            if not -(2**31) <= value < 2**31:
                raise _Refused(f"{value} does not fit int32; write {float(value)}")
            return self._operations.add("constant", (), "int", value)
        if isinstance(value, float):
            return self._operations.add("constant", (), "float", value)
        raise _Refused(f"{value!r} is no number")

    def _as(self, number: int, type: Type) -> int:
        """Return a number in another type."""
        found, constant = self._operations.type_of(number), self._operations.constant_of(number)
        if found == type:
            return number
        if constant is not None:
            return self._operations.add("constant", (), type, float(constant) if type == "float" else int(constant))
        return self._operations.add(type, (number,), type)

    def _alike(self, name: str, *operands: int, result: Type | None = None) -> int:
        """Add an operation on numbers: of floats if one is a float, else of integers."""
        kinds = {self._operations.type_of(operand) for operand in operands}
        kind: Type = "float" if "float" in kinds else "int"
        return self._operations.add(name, [self._as(operand, kind) for operand in operands], result or kind)

    def _of_floats(self, name: str, *operands: int) -> int:
        return self._operations.add(name, [self._as(operand, "float") for operand in operands], "float")

    def _of_integers(self, name: str, left: int, right: int) -> int:
        divisor = self._operations.constant_of(right)
        if self._operations.type_of(left) == "float" or not isinstance(divisor, int) or not divisor:
            sign = "//" if name == "floordiv" else "%"
            raise _Refused(f"{sign} divides integers by a constant other than 0; other numbers are divided by /")
        return self._operations.add(name, [self._as(left, "int"), self._as(right, "int")], "int")

    def _of_bools(self, name: str, *operands: int) -> int:
        if any(self._operations.type_of(operand) != "bool" for operand in operands):
            raise _Refused("&, |, ^ and ~ are for comparisons; compare numbers first, as in (a < b) & (c != 0)")
        return self._operations.add(name, operands, "bool")

    def _where(self, condition: int, chosen: int, other: int) -> int:
        if self._operations.type_of(condition) != "bool":
            raise _Refused("torch.where takes a comparison first")
        kinds = {self._operations.type_of(chosen), self._operations.type_of(other)}
        kind: Type = "float" if "float" in kinds else "int" if "int" in kinds else "bool"
        operands = (condition, self._as(chosen, kind), self._as(other, kind))
        return self._operations.add("where", operands, kind)

    def _clamped(self, value: Any, min: Any = None, max: Any = None) -> int:
        number = self._number(value)
        if min is not None:
            number = self._alike("maximum", number, self._number(min))
        return number if max is None else self._alike("minimum", number, self._number(max))

    def _power(self, base: int, exponent: int) -> int:
        power = self._operations.constant_of(exponent)
        if not isinstance(power, int) or not 1 <= power <= 8:
            if self._operations.constant_of(base) == 2:
                return self._of_floats("exp2", exponent)
            raise _Refused("** has a constant exponent of 1 to 8, or the base 2; x ** y is torch.exp(torch.log(x) * y)")
        result = base
        for _ in range(power - 1):
            result = self._alike("mul", result, base)
        return result

    def _read(self, read: Any, index: Any) -> int:
        tensor = None
        if isinstance(read, fx.Node) and read.op == "placeholder":
            tensor = self._tensors.get(str(read.target))
        if tensor is None:
            raise _Refused("only tensors have entries, all of whose indices are given at once, as in bias[head, 3]")
        given = index if isinstance(index, tuple) else (index,)
        wanted = [kind for kind in tensor.axes if kind != "query"]
        if len(given) != len(wanted):
            raise _Refused(f"{tensor.name} is read with {len(given)} indices; read it {_reading(tensor)}")
        numbers = []
        for kind, one in zip(wanted, given, strict=True):
            if isinstance(one, slice) or one is None or one is Ellipsis:
                raise _Refused(f"{tensor.name} is read entry by entry, {_reading(tensor)}")
            number = self._number(one)
            if self._operations.type_of(number) != "int":
                raise _Refused(f"{tensor.name} has indices of integers; got {_WORDS[self._operations.type_of(number)]}")
            if kind == "row" and number != self._operations.add("input", (), "int", "row"):
                raise _Refused(f"{tensor.name} has an entry for each row, and a row reads its own, {_reading(tensor)}")
            numbers.append(number)
        return self._operations.add("read", numbers, READ_AS[tensor.dtype], tensor.name)


_WORDS: dict[Type, str] = {"float": "a number", "int": "an integer", "bool": "a truth value, as comparisons are"}


def _reading(tensor: VariantTensor) -> str:
    indices = [kind for kind in tensor.axes if kind != "query"]
    return f"as in {tensor.name}[{', '.join(indices)}]" if indices else f"as {tensor.name}"


def _said(target: Any) -> str:
    if isinstance(target, str):
        return f".{target}()"
    name = getattr(target, "__name__", str(target))
    module = str(getattr(target, "__module__", "") or "").removesuffix("._C._nn")
    return f"{module.lstrip('_')}.{name}" if module and module != "builtins" else name
