"""The functions that classes and modules define in some places; nothing in a model tells that one was replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import CellType, FunctionType, ModuleType
from typing import Any

from compiled_llm.model.version.module_tree import same

Place = tuple[type | ModuleType | FunctionType | CellType, str]
"""A class or a module, and a name in it; or a function or a closure's cell, and an attribute."""

CALLED = frozenset({"__call__", "forward"})  # the methods that every call of a module runs


class Code:
    """Places, and what was found there."""

    def __init__(self) -> None:
        self._lookups: dict[tuple[int, str], Callable[[str], object]] = {}  # by owners' identities
        self._owners: list[object] = []  # held, so that no other object gets the identity of one
        self._known: list[object] = []

    def watch(self, places: Iterable[Place]) -> None:
        """Remember more places, as they are now."""
        for owner, name in places:
            if (id(owner), name) not in self._lookups:
                self._owners.append(owner)
                self._lookups[id(owner), name] = look_up = _lookup_in(owner)
                self._known.append(look_up(name))

    def valid(self) -> bool:
        """Whether all of it is still there."""
        return same(self._known, self._now())

    def remember(self) -> None:
        """Remember all places as they are now."""
        self._known = self._now()

    def _now(self) -> list[object]:
        return [look_up(name) for (_, name), look_up in self._lookups.items()]


class _Attributes:
    def __init__(self, owner: FunctionType | CellType) -> None:
        self._owner = owner

    def get(self, name: str) -> object:
        try:
            return getattr(self._owner, name)
        except ValueError:  # an empty cell
            return None


def _lookup_in(owner: Any) -> Callable[[str], object]:
    """Return what finds a name in the owner of places."""
    return vars(owner).get if isinstance(owner, (type, ModuleType)) else _Attributes(owner).get


def places_of(kinds: Iterable[type], names: Iterable[str] = CALLED) -> Iterator[Place]:
    """Yield the places where the lookup of methods in classes ends, and those where a new method would hide them."""
    for kind in kinds:
        for name in names:
            for base in kind.__mro__:
                yield base, name
                if name in vars(base):
                    break
