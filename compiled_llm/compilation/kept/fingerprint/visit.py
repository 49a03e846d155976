"""What a walk has found so far: entries, names of objects, and places to watch."""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import Any

from compiled_llm.compilation.kept.fingerprint.code import digest
from compiled_llm.compilation.kept.fingerprint.plain import PLAIN, is_dunder, is_named, is_plain
from compiled_llm.model.version.code import Place

_DESCRIBED_ALWAYS = (FunctionType, MethodType, functools.partial)

Describe = Callable[["Visit", Any, str], str]
"""Describes a value, which lies at a place of that name, in words that are the same for equal ones."""

Describers = Sequence[tuple[Any, Describe]]
"""Classes, and what describes their objects; the first that fits."""


class UnhashableError(Exception):
    """Something cannot be hashed; says what and why."""


class Visit:
    """The entries of one walk, hashes by readable names.

    Attributes:
        traced: the hashes of code that was traced: functions with such code are looked into.
        kinds: the classes of the model's modules, as texts.
        looked_up: the names of attributes that hold objects and were looked into; another walk looks into the same.
        reached: the hashes of traced code that was found.
        named: the names of globals and attributes in that code.
        methods: the names of members of classes that were traced.
        outlines: descriptions of functions that were not traced, by their identities.
        objects: the attributes of objects that were looked into, with their classes.
        hidden: what the compiler may call without a trace, so that no guard is about what it reads.
        places: where functions and values were found that a change would replace, for ``ModelVersion.watch_code``.
    """

    def __init__(
        self, describers: Describers, traced: Collection[str], words: Collection[str], kinds: Collection[str]
    ) -> None:
        """``words`` name the attributes whose objects are looked into."""
        self.entries: dict[str, str] = {}
        self.looked_up: set[str] = set()
        self.reached: set[str] = set()
        self.named: set[str] = set()
        self.methods: set[str] = set()
        self.outlines: dict[int, str] = {}
        self.objects: list[tuple[type, dict[str, Any]]] = []
        self.places: list[Place] = []
        self.hidden: list[object] = []
        self.traced = frozenset(traced)
        self.kinds = frozenset(kinds)
        self._words = frozenset(words)
        self._describers = describers
        self._by_kind: dict[type, Describe] = {}
        self._names: dict[int, str] = {}
        self._used_names: Counter[str] = Counter()
        self._seen: dict[int, object] = {}  # held, so that no other object gets the id of one
        self._opened: set[int] = set()
        self._noted: set[tuple[int, str | frozenset[str]]] = set()
        self._left: deque[tuple[str, Callable[[], str]]] = deque()
        self._watches = True

    # ---- what was found

    def has_seen(self, value: object) -> bool:
        """Whether a value was found, so that another in its place changes an entry."""
        return id(value) in self._seen

    def has_opened(self, value: object) -> bool:
        """Whether the parts of a value were hashed."""
        return id(value) in self._opened

    def has_read(self, module: ModuleType, name: str) -> bool:
        """Whether a module's attribute is an entry."""
        return (id(module), name) in self._noted

    # ---- for those that describe values

    def describe(self, value: object, where: str) -> str:
        """Describe a value in words that are the same for equal ones; objects get entries of their own."""
        kind = type(value)
        if kind in PLAIN:
            return f"{kind.__name__} {value!r}"
        self.see(value)
        if kind not in self._by_kind:
            self._by_kind[kind] = next(found for kinds, found in self._describers if issubclass(kind, kinds))
        return self._by_kind[kind](self, value, where)

    def describe_all(self, where: str, values: Iterable[object]) -> str:
        """Describe several values, in their order."""
        return f"({', '.join(self.describe(value, where) for value in values)})"

    def describe_attribute(self, name: str, value: object, where: str) -> str:
        """Describe an attribute; of an object say only that there is one, unless traced code may read it."""
        if not self.is_described(name, value):
            return "an object"
        if not (is_plain(value) or isinstance(value, _DESCRIBED_ALWAYS)):
            self.looked_up.add(name)
        return self.describe(value, f"{where}.{name}")

    def describe_attributes(self, attributes: Mapping[str, Any], where: str) -> Iterator[str]:
        """Describe those of an object that tell something of it."""
        named = ((name, value) for name, value in attributes.items() if is_named(name))
        return (f"{name}: {self.describe_attribute(name, value, where)}" for name, value in named)

    def is_described(self, name: str, value: object) -> bool:
        """Whether ``describe_attribute`` says more than that there is one."""
        return is_plain(value) or isinstance(value, _DESCRIBED_ALWAYS) or name in self._words or is_dunder(name)

    def see(self, value: object) -> None:
        """Note that a value was found."""
        self._seen[id(value)] = value

    def open(self, value: object) -> bool:
        """Note that the parts of a value are hashed; False if that was noted."""
        self.see(value)
        first = id(value) not in self._opened
        self._opened.add(id(value))
        return first

    def name(self, value: object, name: str) -> str:
        """Return the name of an object, the same each time it is found; further ones of one name are numbered."""
        if id(value) not in self._names:
            self.see(value)
            self._used_names[name] += 1
            number = self._used_names[name]
            self._names[id(value)] = name if number == 1 else f"{name} ({number})"
        return self._names[id(value)]

    def later(self, value: object, name: str, describe: Callable[[str], str]) -> str:
        """Return the name of an object whose parts are an entry of their own."""
        name = self.name(value, name)
        if self.open(value):
            self._left.append((name, lambda: describe(name)))
        return name

    def first(self, module: ModuleType, names: str | frozenset[str]) -> bool:
        """Note that a module's attribute is an entry, or those that a function names; False if that was noted."""
        noted = (id(module), names)
        first = noted not in self._noted
        self._noted.add(noted)
        return first

    def watch(self, owner: object, names: Iterable[str]) -> None:
        """Let a change of these be noticed in this process."""
        self.places += [(owner, name) for name in names]

    def watch_entries(self, container: object) -> None:
        """Let a change of a container's entries be noticed in this process."""
        if self._watches:
            self.places.append((container, None))

    @contextmanager
    def watching(self, watches: bool) -> Iterator[None]:
        """Watch containers in the block, or do not: ``ModelVersion`` compares those in modules' attributes itself."""
        before = self._watches
        self._watches = watches
        try:
            yield
        finally:
            self._watches = before

    def finish(self) -> None:
        """Describe all that was left for later."""
        while self._left:
            name, describe = self._left.popleft()
            self.entries[name] = digest(describe())
