"""Make a failing case smaller while it still fails: fewer steps, fewer settings, fewer and shorter rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from support.fuzzing.case import Case
from support.fuzzing.data import Data, Prompt, default_of

MAX_TRIED = 300


def shrink(case: Case, fails: Callable[[Case], bool], max_tried: int = MAX_TRIED) -> Case:
    """The smallest failing case that can be reached by making one thing smaller at a time."""
    candidates = _smaller(case)
    for _ in range(max_tried):
        candidate = next(candidates, None)
        if candidate is None:
            break
        if fails(candidate):
            case, candidates = candidate, _smaller(candidate)
    return case


def _smaller(value: Any) -> Iterator[Any]:
    """Each way to make one thing in it smaller, the largest first."""
    if isinstance(value, Prompt):
        yield from _of_prompt(value)
    elif isinstance(value, Data):
        yield from _of_data(value)
    elif isinstance(value, tuple):
        if len(value) > 1 and isinstance(value[-1], Data):
            yield from (value[-1:], value[len(value) // 2 :])
        yield from (value[:index] + value[index + 1 :] for index in range(len(value)) if isinstance(value[index], Data))
        for index, entry in enumerate(value):
            yield from ((*value[:index], less, *value[index + 1 :]) for less in _smaller(entry))
    elif isinstance(value, dict):
        yield from ({key: kept for key, kept in value.items() if key != name} for name in value)


def _of_data(data: Data) -> Iterator[Data]:
    for field in dataclasses.fields(data):  # type: ignore[arg-type]
        value, default = getattr(data, field.name), default_of(field)
        if field.name in ("family", "steps", "prompt") or value == default:
            continue
        yield dataclasses.replace(data, **{field.name: default})  # type: ignore[type-var]
    for field in dataclasses.fields(data):  # type: ignore[arg-type]
        for less in _smaller(getattr(data, field.name)):
            yield dataclasses.replace(data, **{field.name: less})  # type: ignore[type-var]


def _of_prompt(prompt: Prompt) -> Iterator[Prompt]:
    if len(prompt.lengths) > 1:
        for row in range(len(prompt.lengths)):
            yield dataclasses.replace(prompt, lengths=prompt.lengths[:row] + prompt.lengths[row + 1 :])
    for row, length in enumerate(prompt.lengths):
        if length > 1:
            shorter = (*prompt.lengths[:row], length // 2, *prompt.lengths[row + 1 :])
            yield dataclasses.replace(prompt, lengths=shorter)
    for name, value in (("holes", ()), ("period", 0), ("wrong", ""), ("padding", "left"), ("seed", 0)):
        if getattr(prompt, name) != value:
            yield dataclasses.replace(prompt, **{name: value})
