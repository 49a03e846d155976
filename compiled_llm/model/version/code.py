"""The functions and values that code finds in some places; nothing in a model tells that one was replaced."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, KeysView, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter, itemgetter, methodcaller
from types import MappingProxyType, ModuleType
from typing import Any

from compiled_llm.compat.torch.dynamo import before_tracing
from compiled_llm.model.version.module_tree import same

Place = tuple[Any, str | None]
"""An owner and a name, or None for all that is in a container.

The owner is a class, a module or a dictionary, and the name one in it; or another object, and the name an attribute.
"""

_FIXED = frozenset({tuple, frozenset})
"""Containers whose entries stay: who exchanges one exchanges it in the place where it lies."""

CALLED = frozenset({"__call__", "_wrapped_call_impl", "_call_impl", "forward"})
"""The methods that every call of a module runs."""

_GONE = object()  # in place of what is not there
_HAVE_NONE_OF: Callable[..., bool] = type({}.keys()).isdisjoint


class Code:
    """Places, and what was found there."""

    def __init__(self) -> None:
        self._names: dict[int, set[str]] = defaultdict(set)  # by owners' identities
        self._places: list[_Places] = []  # they hold the owners, so that no other object gets the identity of one
        self._containers: dict[int, Collection[Any]] = {}  # whose entries may be exchanged
        self._entries: list[_Entries] = []

    def watch(self, places: Iterable[Place]) -> None:
        """Remember more places, as they are now."""
        found, containers = list[tuple[Any, str]](), list[Collection[Any]]()
        for owner, name in places:
            if name is None:
                if type(owner) not in _FIXED and id(owner) not in self._containers:
                    self._containers[id(owner)] = owner
                    containers.append(owner)
            elif name not in self._names[id(owner)]:
                self._names[id(owner)].add(name)
                found.append((owner, name))
        if found:
            self._places.append(_Places(found))
        if containers:
            self._entries.append(_Entries(containers))

    def valid(self) -> bool:
        """Whether all of it is still there."""
        return all(each.valid() for each in self._places) and all(each.valid() for each in self._entries)

    def remember(self) -> None:
        """Remember all places as they are now."""
        self._places = [_Places([place for each in self._places for place in each.places])]
        self._entries = [_Entries([*self._containers.values()])]


class _Places:
    """Places that are read in few calls, as there are thousands: all of an owner at once, and of owners alike."""

    def __init__(self, places: Sequence[tuple[Any, str]]) -> None:
        self.places = places
        self._single: list[Callable[[], object]] = []
        self._spaces: list[Mapping[str, Any]] = []
        self._entries: list[itemgetter[Any]] = []  # that they have
        self._views: list[KeysView[str]] = []
        self._missing: list[frozenset[str]] = []  # that they do not have
        self._owners: list[list[Any]] = []  # those of whom the same attributes are read
        self._attributes: list[attrgetter[Any]] = []
        spaces, attributes = dict[int, list[str]](), dict[int, list[str]]()
        owners = {id(owner): owner for owner, _ in places}
        for owner, name in places:
            if isinstance(owner, dict) and type(owner) is not dict:  # to look into it may do anything
                self._single.append(partial(dict.get, owner, name, _GONE))
            else:
                kind = spaces if type(owner) is dict or _has_names(owner, name) else attributes
                kind.setdefault(id(owner), []).append(name)
        for number, names in spaces.items():
            self._add_space(owners[number], names)
        self._add_attributes([(owners[number], names) for number, names in attributes.items()])
        self._known = self._now()

    def _add_space(self, owner: object, names: Sequence[str]) -> None:
        space: dict[str, Any] | MappingProxyType[str, Any] = owner if type(owner) is dict else vars(owner)
        if present := [name for name in names if name in space]:
            self._spaces.append(space)
            self._entries.append(itemgetter(*_two(present)))
        if missing := frozenset(names).difference(present):
            self._views.append(space.keys())
            self._missing.append(missing)

    def _add_attributes(self, read: Sequence[tuple[Any, Sequence[str]]]) -> None:
        alike: dict[tuple[str, ...], list[Any]] = defaultdict(list)
        for owner, names in read:
            if all(_attribute(owner, name) is not _GONE for name in names):
                alike[tuple(names)].append(owner)
            else:
                self._single += (partial(_attribute, owner, name) for name in names)
        for same_names, owners in alike.items():
            self._attributes.append(attrgetter(*_two(same_names)))
            self._owners.append(owners)

    def valid(self) -> bool:
        """Whether there is what there was."""
        try:
            now = self._now()
        except (LookupError, AttributeError, ValueError):  # something is gone
            return False
        return all(map(_HAVE_NONE_OF, self._views, self._missing)) and self._has_its_values(now)

    def _has_its_values(self, now: list[object]) -> bool:
        if same(self._known, now):
            return True
        # Traces put functions of torch's in place of methods of ``nn.Module``, which call them.
        only_marked = same([*map(before_tracing, self._known)], [*map(before_tracing, now)])
        if only_marked:
            self._known = now
        return only_marked

    def _now(self) -> list[object]:
        """Return what is there, but for what was missing; LookupError, AttributeError or ValueError if it is gone."""
        entries = map(itemgetter.__call__, self._entries, self._spaces)
        attributes = chain.from_iterable(map(map, self._attributes, self._owners))
        return [*chain.from_iterable(chain(entries, attributes)), *(look_up() for look_up in self._single)]


class _Entries:
    """The entries of containers that were watched together, of dictionaries those that their class hides, too."""

    def __init__(self, containers: Sequence[Collection[Any]]) -> None:
        self._dicts = [each for each in containers if isinstance(each, dict)]
        self._others = [each for each in containers if not isinstance(each, dict)]
        self._mappings = [each for each in self._others if isinstance(each, Mapping)]
        self._known = self._now()
        self._sizes = self._sizes_now()

    def valid(self) -> bool:
        """Whether each of them holds what it held."""
        return self._sizes == self._sizes_now() and same(self._known, self._now())

    def _now(self) -> list[object]:
        dicts: Iterable[Iterable[Any]] = chain(map(dict.keys, self._dicts), map(dict.values, self._dicts))
        others: Iterable[Iterable[Any]] = chain(self._others, map(methodcaller("values"), self._mappings))
        return [*chain.from_iterable(chain(dicts, others))]

    def _sizes_now(self) -> list[int]:
        return [*map(dict.__len__, self._dicts), *map(len, self._others)]


def _two(names: Sequence[str]) -> Sequence[str]:
    """Return names that a getter returns a tuple for."""
    return [*names, *names] if len(names) == 1 else names


def _has_names(owner: object, name: str) -> bool:
    """Whether a name is looked up in a class or module itself."""
    return isinstance(owner, (type, ModuleType)) and name != "__mro__"


def _attribute(owner: object, name: str) -> object:
    try:
        return getattr(owner, name, _GONE)
    except ValueError:  # an empty cell
        return _GONE


def places_of(kinds: Iterable[type], names: Iterable[str] = CALLED) -> Iterator[Place]:
    """Yield the places where the lookup of methods in classes ends, and those where a new method would hide them."""
    for kind in kinds:
        for name in names:
            for base in kind.__mro__:
                yield base, name
                if name in vars(base):
                    break
