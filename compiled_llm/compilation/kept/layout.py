"""How tensors lie in memory, and the sizes that a program was traced for, which Dynamo would guard in each call."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from types import CodeType
from typing import Any, NamedTuple

from torch import Tensor, nn

from compiled_llm.compat.torch.tensors import storage_number, storage_numbers
from compiled_llm.compilation.kept.paths import Path, look_up, tensors_of_model

Size = int | str
_TYPE_AND_SIZES = attrgetter("dtype", "shape")


def form_of_model(model: nn.Module) -> str:
    """Return a hash of which tensors a model has, how each lies in memory, and which lie in the same memory."""
    tensors: dict[int, int] = {}
    memories: dict[int, int] = {}
    lines = hashlib.sha256()
    for path, tensor in tensors_of_model(model):
        number = tensors.setdefault(id(tensor), len(tensors))
        memory = memories.setdefault(_memory(tensor), len(memories))
        layout = tensor.dtype, tensor.device, tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset()
        lines.update(f"{path} {number} {memory} {type(tensor)} {layout} {tensor.requires_grad}\n".encode())
    return lines.hexdigest()


def layouts_of(tensors: Sequence[Tensor]) -> list[object]:
    """Return the types, sizes and strides of tensors."""
    return [*map(_TYPE_AND_SIZES, tensors), *map(Tensor.stride, tensors)]


def memories_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return numbers that tensors have in common while they share memory."""
    try:
        return storage_numbers(tensors)
    except (NotImplementedError, RuntimeError):  # one is made of others
        return [*map(_memory, tensors)]


def _memory(tensor: Tensor) -> int:
    try:
        return storage_number(tensor)
    except (NotImplementedError, RuntimeError):
        return -id(tensor)


class Sizes(NamedTuple):
    """The sizes and strides of a tensor: numbers, and expressions of symbols."""

    path: Path
    sizes: Sequence[Size]
    strides: Sequence[Size]


class Shapes:
    """The sizes that a program was traced for, in symbols, and what has to hold for them."""

    def __init__(
        self, tensors: Sequence[Sizes], guards: Sequence[str], ranges: Mapping[str, Sequence[int | None]]
    ) -> None:
        """ValueError if an expression is none of whole numbers and symbols."""
        self.tensors = tensors
        self.guards = guards
        self.ranges = ranges
        self._dimensions = [len(tensor.sizes) for tensor in tensors]
        self._sizes = [size for tensor in tensors for size in tensor.sizes]
        self._strides = [stride for tensor in tensors for stride in tensor.strides]
        everything = {*self._sizes, *self._strides}
        used = [size for size in everything if isinstance(size, str)]
        self._constants: dict[Size, int] = {size: size for size in everything if isinstance(size, int)}
        self._expressions = [(size, _compiled(size)) for size in used if not size.isidentifier()]
        known = [size for size in {*self._sizes} if isinstance(size, str) and size.isidentifier()]
        self._symbols = [(name, self._sizes.index(name)) for name in known]
        self._guards = [_compiled(guard) for guard in guards]
        if unknown := [each for each in (*used, *guards) if not _symbols_in(each) <= {*known}]:
            raise ValueError(f"a size that no argument has, {unknown[0]}")
        self._bounds = [(name, *_bounds(ranges[name])) for name in known if name in ranges]

    def fitting(self, tensors: Sequence[Tensor]) -> Mapping[Size, int] | None:
        """Return the value of each symbol, expression and number; None if tensors, in the order here, do not fit."""
        shapes = [*map(Tensor.size, tensors)]
        if [*map(len, shapes)] != self._dimensions:
            return None
        sizes = [*chain.from_iterable(shapes)]
        strides = [*chain.from_iterable(map(Tensor.stride, tensors))]
        values = {name: sizes[place] for name, place in self._symbols}
        if not self._hold(values):
            return None
        numbers: dict[Size, int] = {**self._constants}
        numbers.update(values)
        numbers.update((size, _value(code, values)) for size, code in self._expressions)
        if [*map(numbers.__getitem__, self._sizes)] != sizes:
            return None
        kept = [*map(numbers.__getitem__, self._strides)]
        if kept != strides and any(map(_differ, sizes, kept, strides)):
            return None
        return numbers

    def _hold(self, values: Mapping[str, int]) -> bool:
        for name, least, most in self._bounds:
            if not least <= values[name] <= most:
                return False
        return not self._guards or all(_value(code, values) for code in self._guards)

    def misfit(self, arguments: Mapping[str, Any]) -> str:
        """Return in words which sizes do not fit."""
        for tensor in self.tensors:
            now = look_up(arguments, tensor.path)
            others = [size for size, there in zip(tensor.sizes, now.shape, strict=False) if there != size]
            if len(tensor.sizes) != now.dim() or any(isinstance(size, int) for size in others):
                return f"{'.'.join(map(str, tensor.path))} has sizes {[*now.shape]}, and had {[*tensor.sizes]}"
        return "symbolic sizes or strides are others"


def _bounds(bounds: Sequence[int | None]) -> tuple[float, float]:
    least, most = bounds
    return -math.inf if least is None else least, math.inf if most is None else most


def _differ(size: int, stride: int, other: int) -> bool:
    """Whether two strides are different; those of a size of one make no difference."""
    return size > 1 and stride != other


_FUNCTIONS: dict[str, Callable[..., Any]] = {"max": max, "min": min, "abs": abs}


@functools.lru_cache(1024)
def _compiled(expression: str) -> CodeType:
    """Compile an expression of whole numbers, symbols and a few functions; ValueError if it has other constants."""
    code = compile(expression, "<sizes>", "eval")
    if not all(type(value) in (int, type(None)) for value in code.co_consts):
        raise ValueError(f"an expression of sizes that is not understood, {expression}")
    return code


def _symbols_in(expression: str) -> set[str]:
    return {*_compiled(expression).co_names} - _FUNCTIONS.keys()


def _value(code: CodeType, values: Mapping[str, int]) -> Any:
    return eval(code, {"__builtins__": {}, **_FUNCTIONS}, dict(values))


def memory_shared(memories: Sequence[int | None], written: Iterable[int]) -> list[list[int]]:
    """Return the places of memory that is shared with a place that is written to, together, each group once.

    ``memories`` are those of inputs, by ``memories_of``; None of those that are no tensors.
    """
    groups: dict[int, list[int]] = {memory: [] for place in written if (memory := memories[place]) is not None}
    for place, memory in enumerate(memories):
        if memory in groups:
            groups[memory].append(place)
    return sorted(group for group in groups.values() if len(group) > 1)
