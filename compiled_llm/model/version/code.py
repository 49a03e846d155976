"""The functions and values that code finds in some places; nothing in a model tells that one was replaced."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from types import ModuleType
from typing import Any

from compiled_llm.compat.torch.dynamo import before_dynamo
from compiled_llm.model.version.module_tree import same

Place = tuple[Any, str | None]
"""An owner and a name, or None for all that is in a container.

The owner is a class, a module or a dictionary, and the name one in it; or another object, and the name an attribute.
"""

_FIXED = frozenset({tuple, frozenset})
"""Containers whose entries stay: who exchanges one exchanges it in the place where it lies."""

CALLED = frozenset({"__call__", "forward"})  # the methods that every call of a module runs


class Code:
    """Places, and what was found there."""

    def __init__(self) -> None:
        self._lookups: dict[tuple[int, str], Callable[[], object]] = {}  # by owners' identities
        self._containers: dict[int, Collection[Any]] = {}  # whose entries may be exchanged
        self._owners: list[object] = []  # held, so that no other object gets the identity of one
        self._known: list[object] = []
        self._held: list[object] = []  # by containers

    def watch(self, places: Iterable[Place]) -> None:
        """Remember more places, as they are now."""
        for owner, name in places:
            if name is None:
                if type(owner) not in _FIXED and id(owner) not in self._containers:
                    self._containers[id(owner)] = owner
                    self._held += _entries(owner)
            elif (id(owner), name) not in self._lookups:
                self._owners.append(owner)
                self._lookups[id(owner), name] = look_up = _lookup_in(owner, name)
                self._known.append(look_up())

    def valid(self) -> bool:
        """Whether all of it is still there."""
        return self._has_its_values(self._now()) and same(self._held, self._held_now())

    def remember(self) -> None:
        """Remember all places as they are now."""
        self._known, self._held = self._now(), self._held_now()

    def _has_its_values(self, now: list[object]) -> bool:
        if same(self._known, now):
            return True
        # The first trace of a process puts functions of Dynamo's in place of methods of ``nn.Module``, which call them.
        only_marked = same([*map(before_dynamo, self._known)], [*map(before_dynamo, now)])
        if only_marked:
            self._known = now
        return only_marked

    def _now(self) -> list[object]:
        return [look_up() for look_up in self._lookups.values()]

    def _held_now(self) -> list[object]:
        return [entry for container in self._containers.values() for entry in _entries(container)]


def _entries(container: Collection[Any]) -> Iterable[object]:
    """Return the entries of a container, of a dictionary those that its class hides, too."""
    if isinstance(container, dict):
        return [*dict.keys(container), *dict.values(container)]
    return [*container, *container.values()] if isinstance(container, Mapping) else [*container]


def _lookup_in(owner: Any, name: str) -> Callable[[], object]:
    """Return what finds a name in the owner of a place."""
    if isinstance(owner, dict):
        return partial(dict.get, owner, name)
    has_names = isinstance(owner, (type, ModuleType)) and name != "__mro__"
    return partial(vars(owner).get, name) if has_names else partial(_attribute, owner, name)


def _attribute(owner: object, name: str) -> object:
    try:
        return getattr(owner, name, None)
    except ValueError:  # an empty cell
        return None


def places_of(kinds: Iterable[type], names: Iterable[str] = CALLED) -> Iterator[Place]:
    """Yield the places where the lookup of methods in classes ends, and those where a new method would hide them."""
    for kind in kinds:
        for name in names:
            for base in kind.__mro__:
                yield base, name
                if name in vars(base):
                    break
