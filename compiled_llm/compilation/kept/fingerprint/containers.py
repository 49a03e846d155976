"""Containers: their classes, entries, and attributes of their own."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from compiled_llm.compilation.kept.fingerprint.plain import is_said, path_of
from compiled_llm.compilation.kept.fingerprint.visit import Describe, UnhashableError, Visit

LISTS = (list, tuple, set, frozenset, deque)
_MOST = 10_000  # entries of one container, beyond which comparing takes longer than it saves
_UNORDERED = (set, frozenset)
_OF_PYTHON = ("builtins", "collections")


def describe_dict(visit: Visit, value: Mapping[Any, Any], where: str) -> str:
    """Return a dictionary's class and entries, in their order."""
    if (known := _again(visit, value, where)) is not None:
        return known
    factory = getattr(value, "default_factory", None)
    visit.hidden.append(factory)
    made = visit.said(factory, where)
    return f"{_kind(visit, value, where)} {made} {entries_of(visit, value, where)}{_beside(visit, value, where)}"


def entries_of(visit: Visit, value: Mapping[Any, Any], where: str) -> str:
    """Return a dictionary's entries."""
    items = [(key, entry) for key, entry in value.items() if not _is_of_other_models(visit, key)]
    return "{" + ", ".join(visit.all(where, *item) for item in items) + "}"


def describe_list(visit: Visit, value: Collection[Any], where: str) -> str:
    """Return the class of a list, tuple or set, and its entries; those of sets have no order."""
    if not isinstance(value, (tuple, frozenset)) and (known := _again(visit, value, where)) is not None:
        return known
    visit.open(value)
    _bound(value, where)
    entries: Iterable[str] = (visit.said(entry, where) for entry in value)
    entries = sorted(entries) if isinstance(value, _UNORDERED) else entries
    return f"{_kind(visit, value, where)}[{', '.join(entries)}]{_beside(visit, value, where)}"


def around(*parts: str) -> Describe:
    """Return what describes an object by some attributes, which are all that it is."""

    def describe(visit: Visit, value: Any, where: str) -> str:
        visit.open(value)
        with visit.watching(True):
            said = visit.all(where, *(getattr(value, part) for part in parts))
        return f"{type(value).__name__}{said}"

    return describe


def _again(visit: Visit, value: Collection[Any], where: str) -> str | None:
    """Return the name of a container that was found before; a container may hold itself."""
    if visit.opened(value):
        return f"that of {visit.name(value, where)}"
    visit.open(value)
    _bound(value, where)
    visit.name(value, where)
    visit.watch_entries(value)
    return None


def _bound(value: Collection[Any], where: str) -> None:
    if len(value) > _MOST:
        raise UnhashableError(f"{where} has {len(value)} entries")


def _kind(visit: Visit, value: object, where: str) -> str:
    return path_of(type(value)) if type(value).__module__ in _OF_PYTHON else visit.said(type(value), where)


def _beside(visit: Visit, value: object, where: str) -> str:
    """Return the attributes of a container's own, which one of a library's class may have."""
    held = getattr(value, "__dict__", None) or {}
    visit.watch(held, *held)
    return "".join(f"; {name}: {visit.attribute(name, entry, where)}" for name, entry in held.items() if is_said(name))


def _is_of_other_models(visit: Visit, key: object) -> bool:
    """Whether a table of transformers' has an entry for a class that no module here has."""
    return isinstance(key, str) and key.startswith("<class '") and key not in visit.kinds
