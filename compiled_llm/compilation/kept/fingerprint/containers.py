"""Containers: their classes, entries, and attributes of their own."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from compiled_llm.compilation.kept.fingerprint.plain import path_of
from compiled_llm.compilation.kept.fingerprint.visit import Describe, UnhashableError, Visit
from compiled_llm.model.version.contents import MOST_ENTRIES

_OF_PYTHON = ("builtins", "collections")


def describe_container(visit: Visit, value: Collection[Any], where: str) -> str:
    """Return a container's class and entries; those of sets have no order, and others may hold themselves."""
    if len(value) > MOST_ENTRIES:
        raise UnhashableError(f"{where} has {len(value)} entries")
    first = visit.open(value)
    if not isinstance(value, (tuple, frozenset)):
        name = visit.name(value, where)
        if not first:
            return f"that of {name}"
        visit.watch_entries(value)
    kind = path_of(type(value)) if type(value).__module__ in _OF_PYTHON else visit.describe(type(value), where)
    held = getattr(value, "__dict__", None) or {}
    visit.watch(held, held)
    return "; ".join((f"{kind}{_entries(visit, value, where)}", *visit.describe_attributes(held, where)))


def _entries(visit: Visit, value: Collection[Any], where: str) -> str:
    if isinstance(value, Mapping):
        factory = getattr(value, "default_factory", None)
        visit.hidden.append(factory)
        return f" {visit.describe(factory, where)} {entries_of(visit, value, where)}"
    entries = [visit.describe(entry, where) for entry in value]
    return f"[{', '.join(sorted(entries) if isinstance(value, (set, frozenset)) else entries)}]"


def entries_of(visit: Visit, value: Mapping[Any, Any], where: str) -> str:
    """Return a dictionary's entries, in their order."""
    items = [item for item in value.items() if not _is_of_other_models(visit, item[0])]
    return "{" + ", ".join(visit.describe_all(where, item) for item in items) + "}"


def around(*parts: str) -> Describe:
    """Return what describes an object by some attributes, which are all that it is."""

    def describe(visit: Visit, value: object, where: str) -> str:
        visit.open(value)
        with visit.watching(True):
            return f"{type(value).__name__}{visit.describe_all(where, [getattr(value, part) for part in parts])}"

    return describe


def _is_of_other_models(visit: Visit, key: object) -> bool:
    """Whether a table of transformers' has an entry for a class that no module here has."""
    return isinstance(key, str) and key.startswith("<class '") and key not in visit.kinds
