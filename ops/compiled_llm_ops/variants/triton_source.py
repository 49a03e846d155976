"""A variant in Triton: the source of its device functions, and these functions, jitted."""

from __future__ import annotations

import linecache
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import Tensor

from compiled_llm_ops.variants.expressions import INPUTS, READ_AS, Expression, Type, VariantTensor, literal
from compiled_llm_ops.variants.registry import Variant

if TYPE_CHECKING:
    from compiled_llm_ops.kernels.logits import LogitsTransform

_PLACES = ("row", "head", "query", "query_position", "key_position", "tensors", "sizes")
_OPERATORS = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "and": "&", "or": "|", "xor": "^",
    "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=",
}  # fmt: skip
_FUNCTIONS = {
    **{name: f"tl.{name}" for name in ("exp", "exp2", "log", "log2", "sqrt", "sigmoid", "abs", "minimum", "maximum")},
    "where": "tl.where",
    "floordiv": "floor_div",
    "mod": "floor_mod",
}
_INFINITY, _NAN = 'float("inf")', 'float("nan")'
_DTYPES: dict[Type, str] = {"float": "tl.float32", "int": "tl.int32", "bool": "tl.int1"}


def source_of(variant: Variant) -> str:
    """Return the source of ``logits`` and ``visible``, those that the variant has."""
    functions = [
        _function(name, arguments, expression, variant.tensors)
        for name, arguments, expression in (
            ("logits", ("logit", *_PLACES), variant.logits),
            ("visible", _PLACES, variant.visible),
        )
        if expression is not None
    ]
    return "\n\n".join(functions)


def logits_transform(variant: Variant, tensors: Sequence[Tensor]) -> LogitsTransform:
    """Return a variant as kernels take it, with its tensors, which have been checked; imports Triton."""
    from compiled_llm_ops.kernels.logits import LogitsTransform

    if variant not in _jitted:
        _jitted[variant] = _jit(variant)
    logits, visible = _jitted[variant]
    sizes = tuple(
        tensor.shape[axis] for own, tensor in zip(variant.tensors, tensors, strict=True) for axis in own.sized
    )
    return LogitsTransform(logits, visible, tuple(own.contiguous() for own in tensors), sizes, variant.softmax)


_jitted: WeakKeyDictionary[Variant, tuple[Any, Any]] = WeakKeyDictionary()


def _jit(variant: Variant) -> tuple[Any, Any]:
    """Triton reads a function's source by its file and line, and hashes it: it need not be on a disk."""
    import triton
    import triton.language as tl

    from compiled_llm_ops.kernels.logits import floor_div, floor_mod

    source, path = source_of(variant), f"<variant {variant.key}>"
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
    names: dict[str, Any] = {"__name__": __name__, "triton": triton, "tl": tl}
    names |= {"floor_div": floor_div, "floor_mod": floor_mod}
    exec(compile(source, path, "exec"), names)
    return names.get("logits"), names.get("visible")


def _function(name: str, arguments: Sequence[str], expression: Expression, tensors: Sequence[VariantTensor]) -> str:
    lines = [f"@triton.jit\ndef {name}({', '.join(arguments)}):"]

    def assigned(text: str) -> str:
        lines.append(f"    x{len(lines)} = {text}")
        return f"x{len(lines) - 1}"

    def read(tensor: str, indices: Sequence[str]) -> str:
        number = [own.name for own in tensors].index(tensor)
        own, sizes = tensors[number], _sizes_of(tensors, number)
        place, inside = _place(own, indices, sizes)
        mask = f", mask={' & '.join(inside)}, other=0" if inside else ""
        entry = assigned(f"tl.load(tensors[{number}] + {place}{mask})")
        return assigned(f"{entry}.to({_DTYPES[READ_AS[own.dtype]]})")

    def compute(operation: str, operands: Sequence[str], type: Type) -> str:
        if operation in ("float", "int"):
            return assigned(f"{operands[0]}.to({_DTYPES[type]})")
        if operation in _OPERATORS:
            return assigned(f"{operands[0]} {_OPERATORS[operation]} {operands[1]}")
        if operation == "neg":
            return assigned(f"-{operands[0]}")
        if operation == "not":
            return assigned(f"~{operands[0]}")
        if operation == "tanh":
            # 2 / ln 2: of the exponential that there is an instruction for.
            return assigned(f"1.0 - 2.0 / (tl.exp2({operands[0]} * 2.8853900817779268) + 1.0)")
        return assigned(f"{_FUNCTIONS[operation]}({', '.join(operands)})")

    result = expression.evaluate(
        {own: own for own in INPUTS},
        read,
        lambda value, type: f"({literal(value, type, _INFINITY, _NAN)})",
        compute,
    )
    return "\n".join([*lines, f"    return {result}\n"])


def _sizes_of(tensors: Sequence[VariantTensor], number: int) -> list[str]:
    """Return the sizes of a tensor's sized axes, which follow those of the tensors before it."""
    first = sum(len(own.sized) for own in tensors[:number])
    return [f"sizes[{first + place}]" for place in range(len(tensors[number].sized))]


def _place(tensor: VariantTensor, indices: Sequence[str], sizes: Sequence[str]) -> tuple[str, list[str]]:
    """Return where an entry lies in a contiguous tensor, and what tells that it is inside."""
    place, given = "0", list(indices)
    if tensor.axes[0] in ("row", "query"):
        place = f"{'query' if tensor.axes[0] == 'query' else given.pop(0)}.to(tl.int64)"
    inside = []
    for index, size in zip(given, sizes, strict=True):
        place = index if place == "0" else f"({place} * {size} + {index})"
        inside += [f"({index} >= 0)", f"({index} < {size})"]
    return place, inside
