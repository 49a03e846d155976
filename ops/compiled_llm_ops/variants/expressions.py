"""The traced functions of a variant: a list of operations, which PyTorch, Triton and C++ are written from."""

# Nothing is cast implicitly: the operands of an operation have one type, and a cast is an operation of its own.

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch

Type = Literal["float", "int", "bool"]  # float32, int32, and a truth value

Index = Literal["row", "query", "head", "position"]  # what an axis of a variant's tensor is indexed by

INPUTS: dict[str, Type] = {
    "logit": "float",
    "row": "int",
    "head": "int",
    "query_position": "int",
    "key_position": "int",
}
"""The arguments of ``logits``, in order; ``visible`` has those after the first."""

READ_AS: dict[torch.dtype, Type] = {
    torch.float32: "float",
    torch.float16: "float",
    torch.bfloat16: "float",
    torch.int32: "int",
    torch.int64: "int",
    torch.bool: "bool",
}
"""The dtypes that a variant's tensors may have, and what their entries are read as."""

_Value = TypeVar("_Value")


class VariantTensor(NamedTuple):
    """A tensor that a variant reads."""

    name: str
    axes: tuple[Index, ...]  # what indexes each; ``"row"`` or ``"query"`` comes first, if at all
    dtype: torch.dtype

    @property
    def sized(self) -> tuple[int, ...]:
        """The axes whose sizes a kernel needs: all but rows and queries, of which there are as many as it attends."""
        return tuple(axis for axis, index in enumerate(self.axes) if index in ("head", "position"))


class Operation(NamedTuple):
    """One operation."""

    name: str  # ``"input"``, ``"constant"``, ``"read"`` of a tensor, or what is computed
    operands: tuple[int, ...]  # numbers of earlier operations
    type: Type
    value: str | float | bool | None = None  # the name of an input or of a tensor, or a constant


class Expression(NamedTuple):
    """Operations, the last of which is the result."""

    operations: tuple[Operation, ...]

    @property
    def tensors(self) -> set[str]:
        """The names of tensors that are read."""
        return {str(operation.value) for operation in self.operations if operation.name == "read"}

    def __str__(self) -> str:
        return "\n".join(
            f"{number} = {operation.name}{operation.operands} {operation.type} {operation.value!r}"
            for number, operation in enumerate(self.operations)
        )

    def evaluate(
        self,
        inputs: Mapping[str, _Value],
        read: Callable[[str, Sequence[_Value]], _Value],
        constant: Callable[[Any, Type], _Value],
        compute: Callable[[str, Sequence[_Value], Type], _Value],
    ) -> _Value:
        """Return the result, as a value or as text, by what reads tensors, makes constants, and computes."""
        found: list[_Value] = []
        for name, numbers, type, value in self.operations:
            operands = [found[number] for number in numbers]
            if name == "input":
                found.append(inputs[str(value)])
            elif name == "constant":
                found.append(constant(value, type))
            elif name == "read":
                found.append(read(str(value), operands))
            else:
                found.append(compute(name, operands, type))
        return found[-1]


class OperationList:
    """A collection of operations, each once."""

    def __init__(self) -> None:
        self._operations: list[Operation] = []
        self._known: dict[tuple[Operation, str], int] = {}

    def add(self, name: str, operands: Sequence[int], type: Type, value: str | float | bool | None = None) -> int:
        """Return the number of an operation."""
        operation = Operation(name, tuple(operands), type, value)
        key = operation._replace(value=None), repr(value)  # 0.0 and -0.0 are equal, and True and 1
        if key not in self._known:
            self._known[key] = len(self._operations)
            self._operations.append(operation)
        return self._known[key]

    def type_of(self, number: int) -> Type:
        return self._operations[number].type

    def constant_of(self, number: int) -> float | int | bool | None:
        """Return the value of a constant; None if it is none."""
        operation = self._operations[number]
        return None if operation.name != "constant" else cast("float | int | bool", operation.value)

    def ending_with(self, result: int) -> Expression:
        """Return what a result needs."""
        needed = {result}
        for number in range(result, -1, -1):
            if number in needed:
                needed.update(self._operations[number].operands)
        numbers = {number: place for place, number in enumerate(sorted(needed))}
        kept = (self._operations[number] for number in numbers)
        return Expression(
            tuple(own._replace(operands=tuple(numbers[operand] for operand in own.operands)) for own in kept)
        )


def literal(value: Any, type: Type, infinity: str, nan: str) -> str:
    """Return a constant as Python and C write it, but for infinity and what is no number."""
    if type != "float" or math.isfinite(value):
        return repr(value)
    if math.isnan(value):
        return nan
    return infinity if value > 0 else f"-{infinity}"
