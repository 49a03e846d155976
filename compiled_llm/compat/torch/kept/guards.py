"""Dynamo's guards of the trace that a backend is called in: what each is about, and the way to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from torch._guards import TracingContext

if TYPE_CHECKING:
    from torch._dynamo.source import AttrSource
    from torch._guards import Guard, Source


OF_PROCESS = frozenset(
    {
        *("GRAD_MODE", "DETERMINISTIC_ALGORITHMS", "GLOBAL_STATE", "TORCH_FUNCTION_STATE", "DEFAULT_DEVICE"),
        *("AUTOGRAD_SAVED_TENSORS_HOOKS", "FUNCTORCH_STACK_MATCH", "DUAL_LEVEL", "FSDP_TRAINING_STATE"),
    }
)
"""The kinds of guards that are about the process and its thread; ``process_state`` has what they compare."""

OF_PRESENCE = "HASATTR"
"""The kind of those about whether there is an attribute."""

OF_SIZES = "SHAPE_ENV"
"""The kind of the one guard about symbolic sizes."""


class Step(NamedTuple):
    """A part of the way to what a guard is about: a value, and by which name it was read from the one before."""

    expression: str  # in Dynamo's words
    name: str | None  # of an attribute or a global; None for other steps
    value: object


class Guarded(NamedTuple):
    """One guard."""

    kind: str  # Dynamo's name for it
    about: str  # what it is about, in Dynamo's words
    way: tuple[Step, ...]  # to that, from the outermost value on; empty if that is no value
    missing: bool = False  # whether there was none


def guards_now(arguments: Mapping[str, Any], scope: Mapping[str, Any]) -> Iterator[Guarded]:
    """Yield the guards so far, of a function with these ``arguments``, by name, and globals."""
    context = TracingContext.try_get()
    if context is None:
        raise RuntimeError("guards are read while a backend is called")
    found = _Values(arguments, scope)
    for guard in context.guards_context.dynamo_guards:
        kind, source = guard.create_fn_name(), guard.originating_source
        try:
            way = found.way_to_presence(guard) if kind == OF_PRESENCE else found.way_to(source)
            yield Guarded(kind, guard.name, way)
        except Exception:  # any: it evaluates expressions of Dynamo's
            yield Guarded(kind, guard.name, (), missing=True)


class _Values:
    """The values that Dynamo's sources name, each looked up once."""

    def __init__(self, arguments: Mapping[str, Any], scope: Mapping[str, Any]) -> None:
        self._scope = {**_helpers(), "L": arguments, "G": scope}
        self._known: dict[str, Any] = {}

    def way_to(self, source: Source | None) -> tuple[Step, ...]:
        steps: list[Step] = []
        while source is not None and (expression := _expression(source)):
            name = getattr(source, "member", None) or getattr(source, "global_name", None)
            steps.append(Step(expression, name, self._value(expression)))
            source = getattr(source, "base", None)
        return tuple(reversed(steps))

    def way_to_presence(self, guard: Guard) -> tuple[Step, ...]:
        """``way_to`` of an attribute that may be absent; None is its value, for only what has it matters."""
        source = guard.originating_source
        name = getattr(guard.create_fn, "keywords", {}).get("attr")
        if name is None:  # until torch 2.12, the guard's source is the attribute
            attribute = cast("AttrSource", source)
            source, name = attribute.base, attribute.member
        return *self.way_to(source), Step(f"{_expression(source)}.{name}", name, None)

    def _value(self, expression: str) -> object:
        if expression not in self._known:
            self._known[expression] = eval(expression, self._scope)  # as Dynamo does; it has made the expression
        return self._known[expression]


def _expression(source: Source) -> str:
    name = source.name
    return str(name() if callable(name) else name)


def _helpers() -> dict[str, Any]:
    """Return the functions that Dynamo's expressions call."""
    from torch._dynamo import guards

    with suppress(AttributeError):
        return dict(guards._get_closure_vars())
    return dict(guards.CLOSURE_VARS)  # type: ignore[attr-defined]
