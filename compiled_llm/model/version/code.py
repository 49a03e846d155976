"""The functions that classes and modules define in some places; nothing in a model tells that one was replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import ModuleType

from compiled_llm.model.version.module_tree import same

Place = tuple[type | ModuleType, str]  # a class or a module, and a name in it

CALLED = frozenset({"__call__", "forward"})  # the methods that every call of a module runs


class Code:
    """Places, and what was found there."""

    def __init__(self) -> None:
        self._lookups: dict[Place, Callable[[str], object]] = {}
        self._known: list[object] = []

    def watch(self, places: Iterable[Place]) -> None:
        """Remember more places, as they are now."""
        for place in places:
            if place not in self._lookups:
                owner, name = place
                self._lookups[place] = vars(owner).get
                self._known.append(vars(owner).get(name))

    def valid(self) -> bool:
        """Whether all of it is still there."""
        return same(self._known, self._now())

    def remember(self) -> None:
        """Remember all places as they are now."""
        self._known = self._now()

    def _now(self) -> list[object]:
        return [look_up(name) for (_, name), look_up in self._lookups.items()]


def places_of(kinds: Iterable[type], names: Iterable[str] = CALLED) -> Iterator[Place]:
    """Yield the places where the lookup of methods in classes ends, and those where a new method would hide them."""
    for kind in kinds:
        for name in names:
            for base in kind.__mro__:
                yield base, name
                if name in vars(base):
                    break
