"""Places where code finds functions and values are read in few calls, and each change there is noticed."""

from __future__ import annotations

import types
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any

import pytest

from compiled_llm.model.version.code import Code, Place


def closing(value: object) -> Callable[[], object]:
    return lambda: value


def cell_of(function: Any) -> CellType:
    cell: CellType = function.__closure__[0]
    return cell


class Places:
    """Owners of each kind, and what is watched in them."""

    def __init__(self) -> None:
        self.kind = type("Kind", (type("Base", (), {}),), {"there": 1, "nothing": None})
        self.module: Any = types.ModuleType("module")
        self.module.there, self.module.also = 1, 2
        self.table: dict[str, Any] = {"there": 1, "also": 2}
        self.ordered: dict[str, Any] = OrderedDict(there=1)
        self.lazy: dict[str, Any] = defaultdict(lambda: 7, there=1)
        self.functions = [FunctionType((lambda x=1: x).__code__, {}, "function", (1,)) for _ in range(3)]
        self.closures = [closing(value) for value in (1, 2)]
        self.empty = CellType()
        self.object: Any = types.SimpleNamespace(there=1)
        self.lists: list[list[Any]] = [[1], [], [2]]
        self.sets = {1}
        self.tables: list[dict[str, Any]] = [{"a": 1}, {}]
        self.hiding: Any = UserDict(a=1)

    def places(self) -> list[Place]:
        spaces = (self.kind, self.module, self.table, self.ordered, self.lazy, self.object)
        functions = [(each, name) for each in self.functions for name in ("__code__", "__defaults__", "__kwdefaults__")]
        cells = [(cell, "cell_contents") for cell in (*map(cell_of, self.closures), self.empty)]
        containers = (*self.lists, *self.tables, self.hiding, self.sets)
        return [
            *((space, name) for space in spaces for name in ("there", "missing")),
            *(((self.kind, "nothing"), (self.kind, "__mro__"), (self.object, "__class__"), (self.module, "also"))),
            *(*functions, *cells, *((each, None) for each in containers)),
        ]


CHANGES: dict[str, Callable[[Places], object]] = {
    "a class": lambda own: setattr(own.kind, "there", 2),
    "a class gets more": lambda own: setattr(own.kind, "missing", None),
    "a class has less": lambda own: delattr(own.kind, "nothing"),
    "a class's bases": lambda own: setattr(own.kind, "__bases__", (type("Base", (), {}),)),
    "a module": lambda own: setattr(own.module, "also", 3),
    "a module gets more": lambda own: setattr(own.module, "missing", 3),
    "a module has less": lambda own: delattr(own.module, "also"),
    "a table": lambda own: own.table.update(there=2),
    "an equal value": lambda own: own.table.update(there=1.0),
    "a table gets more": lambda own: own.table.update(missing=None),
    "a table has less": lambda own: own.table.pop("there"),
    "a table of another class": lambda own: own.ordered.update(there=2),
    "a table of another class gets more": lambda own: own.ordered.update(missing=2),
    "a table that fills itself has less": lambda own: own.lazy.pop("there"),
    "code": lambda own: setattr(own.functions[2], "__code__", (lambda x: 2).__code__),
    "defaults": lambda own: setattr(own.functions[1], "__defaults__", (2,)),
    "keywords' defaults": lambda own: setattr(own.functions[0], "__kwdefaults__", {"x": 3}),
    "a cell": lambda own: setattr(cell_of(own.closures[1]), "cell_contents", 3),
    "cells that are exchanged": lambda own: exchange_cells(*map(cell_of, own.closures)),
    "a cell is emptied": lambda own: delattr(cell_of(own.closures[0]), "cell_contents"),
    "an empty cell": lambda own: setattr(own.empty, "cell_contents", None),
    "an object": lambda own: setattr(own.object, "there", 2),
    "an object gets more": lambda own: setattr(own.object, "missing", 2),
    "an object has less": lambda own: delattr(own.object, "there"),
    "an entry of a list": lambda own: own.lists[0].__setitem__(0, 3),
    "a list gets more": lambda own: own.lists[1].append(3),
    "an entry moves to the next list": lambda own: own.lists[1].append(own.lists[0].pop()),
    "an entry of a dictionary": lambda own: own.tables[0].update(a=2),
    "an entry moves to the next dictionary": lambda own: own.tables[1].update(a=own.tables[0].pop("a")),
    "another key": lambda own: own.tables[0].update(b=own.tables[0].pop("a")),
    "an entry of a mapping": lambda own: own.hiding.update(a=2),
    "a key of a mapping": lambda own: own.hiding.update(b=own.hiding.pop("a")),
    "a set": lambda own: own.sets.add(2),
}


def exchange_cells(one: CellType, other: CellType) -> None:
    one.cell_contents, other.cell_contents = other.cell_contents, one.cell_contents


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("name", CHANGES)
def test_each_change_is_noticed_and_then_remembered(name: str, together: bool) -> None:
    own, code = Places(), Code()
    for places in [own.places()] if together else [[place] for place in own.places()]:
        code.watch(places)
    code.watch(own.places())  # they are known
    assert code.valid()
    CHANGES[name](own)
    assert not code.valid()
    code.watch([*own.places(), (own.table, "also")])  # what has changed is not taken for what there was
    assert not code.valid()
    code.remember()
    assert code.valid()
    own.module.there = own.lists[2][0] = 5
    assert not code.valid()


def test_what_was_watched_stays_so_after_it_was_gone() -> None:
    own, code = Places(), Code()
    code.watch(own.places())
    del own.module.also
    assert not code.valid()
    code.remember()
    assert code.valid()
    own.module.also = 2
    assert not code.valid()


def test_what_is_not_watched_may_change() -> None:
    own, code = Places(), Code()
    code.watch(own.places())
    own.kind.unwatched = own.module.unwatched = own.table["unwatched"] = own.object.unwatched = 1  # type: ignore[attr-defined]
    own.lazy["unwatched"] = 1
    assert code.valid()
    assert "missing" not in own.lazy, "nobody fills it"
