"""What a walk has found so far: entries, names of objects, and places to watch."""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import Any

from compiled_llm.compilation.kept.fingerprint.code import digest
from compiled_llm.compilation.kept.fingerprint.plain import PLAIN, is_dunder, is_plain
from compiled_llm.model.version.code import Place

_SAID_ALWAYS = (FunctionType, MethodType, functools.partial)

Describe = Callable[["Visit", Any, str], str]
"""Says what a value is, which lies at a place of that name, in words that are the same for equal ones."""

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
        objects: the attributes of objects that were looked into, with their classes.
        hidden: what the compiler may call without a trace, so that no guard is about what it reads.
        places: where functions and values were found that a change would replace, for ``ModelVersion.watch_code``.
    """

    def __init__(
        self, describers: Describers, traced: Collection[str], words: Container[str], kinds: Collection[str]
    ) -> None:
        """``words`` name the attributes whose objects are looked into."""
        self.entries: dict[str, str] = {}
        self.looked_up: set[str] = set()
        self.reached: set[str] = set()
        self.named: set[str] = set()
        self.methods: set[str] = set()
        self.objects: list[tuple[type, dict[str, Any]]] = []
        self.places: list[Place] = []
        self.hidden: list[object] = []
        self.traced, self.kinds, self._words = frozenset(traced), frozenset(kinds), words
        self._describers = describers
        self._names: dict[int, str] = {}
        self._taken: Counter[str] = Counter()
        self._held: list[object] = []  # so that no other object gets the id of one
        self._seen: set[int] = set()
        self._opened: set[int] = set()
        self._noted: set[tuple[int, str | frozenset[str]]] = set()
        self._by_kind: dict[type, Describe] = {}
        self._left: deque[tuple[str, Callable[[], str]]] = deque()
        self._watches = True

    # ---- what was found

    def saw(self, value: object) -> bool:
        """Whether a value was found, so that another in its place changes an entry."""
        return id(value) in self._seen

    def opened(self, value: object) -> bool:
        """Whether the parts of a value were hashed."""
        return id(value) in self._opened

    def read(self, module: ModuleType, name: str) -> bool:
        """Whether a module's attribute is an entry."""
        return (id(module), name) in self._noted

    # ---- for those that describe values

    def said(self, value: Any, where: str) -> str:
        """Return what a value is, in words that are the same for equal ones; objects get entries of their own."""
        if type(value) in PLAIN:
            return f"{type(value).__name__} {value!r}"
        self.see(value)
        kind = type(value)
        if kind not in self._by_kind:
            self._by_kind[kind] = next(found for kinds, found in self._describers if issubclass(kind, kinds))
        return self._by_kind[kind](self, value, where)

    def all(self, where: str, *values: object) -> str:
        """Return what several values are."""
        return f"({', '.join(self.said(value, where) for value in values)})"

    def attribute(self, name: str, value: object, where: str) -> str:
        """Return what an attribute is; of an object only that there is one, unless traced code may read it."""
        if not self.tells(name, value):
            return "an object"
        if not (is_plain(value) or isinstance(value, _SAID_ALWAYS)):
            self.looked_up.add(name)
        return self.said(value, f"{where}.{name}")

    def tells(self, name: str, value: object) -> bool:
        """Whether ``attribute`` says more than that there is one."""
        return is_plain(value) or isinstance(value, _SAID_ALWAYS) or name in self._words or is_dunder(name)

    def see(self, value: object) -> None:
        """Note that a value was found."""
        if id(value) not in self._seen:
            self._seen.add(id(value))
            self._held.append(value)

    def open(self, value: object) -> None:
        """Note that the parts of a value are hashed."""
        self.see(value)
        self._opened.add(id(value))

    def name(self, value: object, name: str) -> str:
        """Return the name of an object, the same each time it is found; further ones of one name are numbered."""
        if id(value) not in self._names:
            self._taken[name] += 1
            number = self._taken[name]
            self._names[id(value)] = name if number == 1 else f"{name} ({number})"
            self._held.append(value)
        return self._names[id(value)]

    def known(self, value: object) -> str | None:
        """Return the name of an object that was found before."""
        return self._names.get(id(value))

    def later(self, value: object, name: str, describe: Callable[[str], str]) -> str:
        """Return the name of an object whose parts are an entry of their own."""
        name = self.name(value, name)
        if id(value) not in self._opened:
            self.open(value)
            self._left.append((name, lambda: describe(name)))
        return name

    def first(self, module: ModuleType, names: str | frozenset[str]) -> bool:
        """Note that a module's attribute is an entry, or those that a function names; False if that was noted."""
        first = (id(module), names) not in self._noted
        self._noted.add((id(module), names))
        self._held.append(module)
        return first

    def watch(self, owner: object, *names: str) -> None:
        """Let a change of these be noticed in this process."""
        self.places += [(owner, name) for name in names]

    def watch_entries(self, container: object) -> None:
        """Let a change of a container's entries be noticed in this process."""
        if self._watches:
            self.places.append((container, None))

    @contextmanager
    def watching(self, watches: bool) -> Iterator[None]:
        """Watch containers in the block, or do not: ``ModelVersion`` compares those in modules' attributes itself."""
        before, self._watches = self._watches, watches
        try:
            yield
        finally:
            self._watches = before

    def finish(self) -> None:
        """Describe all that was left for later."""
        while self._left:
            name, describe = self._left.popleft()
            self.entries[name] = digest(describe())
