"""The trace that a backend is called in: the inputs of its graph, their sizes, and what it writes besides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._guards import TracingContext

if TYPE_CHECKING:
    from torch._guards import Source
    from torch.utils._sympy.value_ranges import ValueRanges


Size = int | str
"""A number, or an expression of symbols."""


class TracedTensor(NamedTuple):
    """A tensor that Dynamo has looked at."""

    value: Tensor
    sizes: tuple[Size, ...]
    strides: tuple[Size, ...]


class TracedSize(NamedTuple):
    """An input that is a size of a tensor."""

    symbol: Size


Traced = TracedTensor | TracedSize | str
"""An input of a graph, or in Dynamo's words where another one comes from."""


def traced_inputs(graph: fx.Graph) -> Iterator[Traced]:
    """Yield what each input of Dynamo's graph is."""
    for node in graph.find_nodes(op="placeholder"):
        argument, example = node.meta.get("grapharg"), node.meta.get("example_value")
        value = None if argument is None else argument.example
        if isinstance(value, Tensor) and isinstance(example, Tensor):
            yield _traced(value, example)
        elif isinstance(example, torch.SymInt):
            yield TracedSize(_size(example))
        else:
            yield node.name if argument is None else _words(argument.source)


def traced_arguments(arguments: Mapping[str, Any], names: Iterator[str] | tuple[str, ...]) -> Iterator[TracedTensor]:
    """Yield tensors that Dynamo has looked at in these arguments, also those that no graph has as inputs."""
    roots = tuple(f"L['{name}']" for name in names)
    for tracked in _context().fake_mode.shape_env.tracked_fakes or ():  # type: ignore[union-attr]
        words = _words(tracked.source)
        if isinstance(tracked.fake, Tensor) and words.startswith(roots) and not words.endswith("._base"):
            value = eval(words, {"L": arguments})  # as Dynamo does; it has made the expression
            if isinstance(value, Tensor):
                yield _traced(value, tracked.fake)


def size_guards() -> tuple[list[str], dict[str, tuple[int, int | None]]]:
    """Return what has to hold for symbolic sizes, as expressions, and the least and the largest value of each."""
    environment: Any = _context().fake_mode.shape_env  # type: ignore[union-attr]
    ranges = {str(symbol): _range(bounds) for symbol, bounds in environment.var_to_range.items()}
    expressions = [_python(environment.replace(guard.expr)) for guard in environment.guards]
    return [expression for expression in expressions if expression != "True"], ranges


def written_objects() -> list[str]:
    """Return the names of attributes and containers that the trace leaves with another value than they have now."""
    # A graph has no part of that: Dynamo writes them after it, by code of its own.
    from torch._dynamo.symbolic_convert import InstructionTranslator

    effects: Any = InstructionTranslator.current_tx().output.side_effects
    changed = [variable for variable in effects.id_to_variable.values() if effects.is_modified(variable)]
    existing = [variable for variable in changed if type(variable.mutation_type).__name__.endswith("Existing")]
    return [words for variable in existing for words in _written(variable, effects.store_attr_mutations.get(variable))]


def _written(variable: Any, attributes: Mapping[str, Any] | None) -> Iterator[str]:
    words = _words(variable.source)
    if not attributes:
        yield words
        return
    owner = getattr(variable, "value", None)
    for name, written in attributes.items():
        same = written.is_python_constant() and _is_same(getattr(owner, name, written), written.as_python_constant())
        if not same:  # such as a variable that is set for the call, and then as it was
            yield f"{words}.{name}"


def _is_same(value: object, other: object) -> bool:
    return type(value) is type(other) and value == other and isinstance(value, (bool, int, str, type(None)))


def _traced(value: Tensor, example: Tensor) -> TracedTensor:
    return TracedTensor(value, tuple(map(_size, example.shape)), tuple(map(_size, example.stride())))


def _size(value: int | torch.SymInt) -> Size:
    if isinstance(value, int):
        return value
    expression = value.node.expr
    return int(expression) if expression.is_Integer else _python(expression)


def _python(expression: Any) -> str:
    from torch.utils._sympy.printers import PythonPrinter

    return str(PythonPrinter().doprint(expression))


def _range(bounds: ValueRanges[Any]) -> tuple[int, int | None]:
    upper = bounds.upper
    return int(bounds.lower), int(upper) if upper.is_Integer else None


def _words(source: Source) -> str:
    name = source.name
    return str(name() if callable(name) else name)


def _context() -> TracingContext:
    context = TracingContext.try_get()
    assert context is not None, "a backend is being called"
    return context
