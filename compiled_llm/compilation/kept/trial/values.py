"""Layers and what they are made of, as values of JSON."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import torch

_PLAIN = (bool, int, float, str, type(None))
_OWN = "compiled_llm."


class UnsaidError(ValueError):
    """Something cannot be told by values of JSON; the message says what."""


def encoded(value: Any) -> Any:
    """Return a value that ``decoded`` makes an equal one of; UnsaidError if it holds anything else than plain ones."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is torch.dtype:
        return {"dtype": str(value).removeprefix("torch.")}
    if kind in (tuple, list):
        return {kind.__name__: [encoded(entry) for entry in value]}
    if kind.__module__.startswith(_OWN) and (names := _fields(kind)) is not None:
        held = {name: encoded(getattr(value, name)) for name in names}
        return {"class": [kind.__module__, kind.__qualname__], "fields": held}
    raise UnsaidError(f"{kind.__module__}.{kind.__qualname__} is not kept")


def decoded(said: Any) -> Any:
    """Return what ``encoded`` was given; ValueError if it is something else."""
    try:
        return _decoded(said)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"no kept layers: {type(error).__name__}: {error}") from None


def _decoded(said: Any) -> Any:
    if not isinstance(said, dict):
        return said
    if "dtype" in said:
        found = getattr(torch, said["dtype"])
        if not isinstance(found, torch.dtype):
            raise ValueError(f"no dtype: {said['dtype']}")
        return found
    if "class" in said:
        module, name = said["class"]
        kind = getattr(sys.modules[module], name) if module.startswith(_OWN) else None
        if not isinstance(kind, type) or _fields(kind) is None:
            raise ValueError(f"no class of ours: {module}.{name}")
        return kind(**{field: _decoded(value) for field, value in said["fields"].items()})
    if len(said) != 1:
        raise ValueError("no tuple and no list")
    ((kind_name, entries),) = said.items()
    return {"tuple": tuple, "list": list}[kind_name](map(_decoded, entries))


def _fields(kind: type) -> tuple[str, ...] | None:
    """Return the names of what a named tuple or a dataclass is made of; None for other classes."""
    if dataclasses.is_dataclass(kind):
        fields = dataclasses.fields(kind)
        return tuple(field.name for field in fields) if all(field.init for field in fields) else None
    return getattr(kind, "_fields", None) if issubclass(kind, tuple) else None
