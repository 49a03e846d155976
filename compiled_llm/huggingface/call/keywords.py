"""The fields of a dataclass as keyword arguments of a function, for type checkers, IDEs and ``help``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar, cast

Fields = ParamSpec("Fields")
First = TypeVar("First")
Result = TypeVar("Result")


def takes_fields_of(
    dataclass: Callable[Fields, object],
) -> Callable[[Callable[[First], Result]], Callable[Concatenate[First, Fields], Result]]:
    """Spell out the ``**options`` of a function of one argument: the fields of a dataclass, all keyword-only."""
    # So each option has its name, its type and its default in one place.

    def spell_out(function: Callable[[First], Result]) -> Callable[Concatenate[First, Fields], Result]:
        signature = inspect.signature(function)
        first, _ = signature.parameters.values()
        fields = inspect.signature(dataclass, eval_str=True).parameters.values()
        spelled_out = cast("Callable[Concatenate[First, Fields], Result]", function)
        spelled_out.__signature__ = signature.replace(parameters=[first, *fields])  # type: ignore[attr-defined]
        return spelled_out

    return spell_out
