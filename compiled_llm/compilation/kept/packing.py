"""How a program's values are packed into what it returns, as values of JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from compiled_llm.compilation.graphs.outputs import StepOutputs

_PACKED: Mapping[str, type] = {kind.__name__: kind for kind in (StepOutputs,)}


class UnknownResultError(ValueError):
    """A program returns something that cannot be kept; the message says what."""


def described(result: Any, numbers: Mapping[int, int]) -> Any:
    """Describe what a program has returned; ``numbers`` are those of its values, by their identities."""
    if isinstance(result, Tensor):
        if id(result) not in numbers:
            raise UnknownResultError("it returns a tensor that is no output of its graph")
        return numbers[id(result)]
    if isinstance(result, dict):
        return {"dict": [[key, described(value, numbers)] for key, value in result.items()]}
    if type(result) is tuple or type(result).__name__ in _PACKED:
        return {type(result).__name__: [described(value, numbers) for value in result]}
    raise UnknownResultError(f"it returns an object of {type(result).__name__}")


def packing(packed: Any) -> Callable[[Sequence[Any]], Any]:
    """Return what packs values as they were; ValueError if it is described otherwise."""
    if isinstance(packed, int):
        return lambda values: values[packed]
    ((kind, entries),) = packed.items()
    if kind == "dict":
        pairs = [(key, packing(value)) for key, value in entries]
        return lambda values: {key: pack(values) for key, pack in pairs}
    packs = [packing(entry) for entry in entries]
    if kind == "tuple":
        return lambda values: tuple(pack(values) for pack in packs)
    if kind not in _PACKED:
        raise ValueError(f"no kept program: it returns {kind}")
    made = _PACKED[kind]
    return lambda values: made(*(pack(values) for pack in packs))


def read_by(packed: Any) -> set[int]:
    """Return the values that are returned."""
    if isinstance(packed, int):
        return {packed}
    ((kind, entries),) = packed.items()
    inner = [entry for _, entry in entries] if kind == "dict" else entries
    return set().union(*map(read_by, inner))
