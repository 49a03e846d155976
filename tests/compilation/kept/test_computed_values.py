"""A value that code computes when it is read is followed, or the program that has read it is not kept."""

from __future__ import annotations

import abc
import collections
import enum
import functools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import compiled_llm
from compiled_llm.compat.torch.kept.guards import Guarded, Step
from compiled_llm.compilation.kept import part
from compiled_llm.compilation.kept.fingerprint import coverage
from compiled_llm.compilation.kept.fingerprint.walk import Walk
from support.compilation.fingerprinted import traced_programs
from support.compilation.kept_programs import taking
from support.compilation.planted_runs import answer, graphs_run
from support.parity import FEW_PAGES
from support.tiny_models import ONE_LAYER, tiny_qwen3

BEHIND = {"factor": 1.0}
"""What is read behind each value; no other place says it."""

ONES, THREES = [1.0], [3.0]


def factor() -> float:
    return BEHIND["factor"]


class WithProperty(type):
    factor = property(lambda cls: factor())


class WithList(type):
    chosen = property(lambda cls: ONES if factor() == 1 else THREES)


class WithOperators(type):
    def __getitem__(cls, key: str) -> float:
        return cls._held[key]  # type: ignore[attr-defined, no-any-return]


class WithChecks(type):
    def __instancecheck__(cls, value: object) -> bool:
        return factor() == 1

    def __bool__(cls) -> bool:
        return factor() == 1


class WithLookup(type):
    def __getattribute__(cls, name: str) -> Any:
        return factor() if name == "factor" else super().__getattribute__(name)


class OfProperty(metaclass=WithProperty):
    pass


class OfList(metaclass=WithList):
    pass


class OfOperators(metaclass=WithOperators):
    _held = BEHIND


class OfChecks(metaclass=WithChecks):
    pass


class OfLookup(metaclass=WithLookup):
    pass


class Hooked(abc.ABC):  # noqa: B024 (its hook alone matters)
    @classmethod
    def __subclasshook__(cls, kind: type) -> bool:
        return factor() == 1


class Entries(enum.Enum):
    ONE = 1.0
    THREE = 3.0

    def __bool__(self) -> bool:
        return factor() == 1

    @classmethod
    def _missing_(cls, value: object) -> Entries:
        return cls(factor())


class Weighted(enum.Enum):
    ONE = 1.0

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __bool__(self) -> bool:
        """Read nothing but what an entry is hashed by."""
        return bool(self.value)


MODULE = ModuleType("a_module_that_computes")
MODULE.__dict__["__getattr__"] = lambda name: factor()
MADE = collections.defaultdict(factor)
CACHED = functools.cache(factor)


class Missing(dict[str, float]):
    def __missing__(self, key: str) -> float:
        return factor()


MISSING = Missing()

NOT_TRACED: dict[str, Callable[[Any], Any]] = {
    "a property of a metaclass": lambda layer: OfProperty.factor,
    "a list that a metaclass chooses": lambda layer: OfList.chosen[0] * ONES[0] * THREES[0],
    "an item of a class": lambda layer: OfOperators["factor"],
    "instances of a class": lambda layer: 1.0 if isinstance(layer, OfChecks) else 3.0,
    "the truth of a class": lambda layer: 1.0 if OfChecks else 3.0,
    "the lookup of a metaclass": lambda layer: OfLookup.factor,
    "an abstract class": lambda layer: 1.0 if issubclass(type(layer), Hooked) else 3.0,
    "the truth of an entry": lambda layer: 1.0 if Entries.ONE else 3.0,
    "a missing entry": lambda layer: Entries(7.0).value,
    "an attribute of a module": lambda layer: MODULE.factor,  # type: ignore[attr-defined]
    "a default entry": lambda layer: MADE["another"],
}
"""What Dynamo reads without a trace of the code that computes it."""

TRACED: dict[str, Callable[[Any], Any]] = {
    "a property": lambda layer: layer.factor,
    "a missing attribute": lambda layer: layer.computed,
    "a missing key": lambda layer: MISSING["factor"],
    "a function with a cache": lambda layer: CACHED(),
    "an attribute of an entry": lambda layer: Weighted.ONE.factor,
}


class Reading(nn.Module):
    factor = property(lambda self: factor())

    def __init__(self, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.read = read

    def __getattr__(self, name: str) -> Any:
        return factor() if name == "computed" else super().__getattr__(name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(x) * self.read(self)


def model_that_reads(read: Callable[[Any], Any]) -> Any:
    model = tiny_qwen3(**ONE_LAYER)
    model.model.layers[0].mlp.act_fn = Reading(read)
    return model.eval()


@pytest.fixture
def change(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def make() -> None:
        monkeypatch.setitem(BEHIND, "factor", 3.0)
        monkeypatch.setattr(Weighted.ONE, "factor", 3.0)

    return make


@pytest.mark.drawn(most=4)
@pytest.mark.parametrize("name", [*NOT_TRACED, *TRACED])
def test_a_computed_value_is_followed_or_the_program_is_not_kept(name: str, change: Callable[[], None]) -> None:
    read = (NOT_TRACED | TRACED)[name]
    (traced,) = traced_programs(compiled_llm.wrap(model_that_reads(read), **FEW_PAGES))
    change()
    assert traced.fingerprint.refused or traced.call.compared_with(traced.fingerprint)
    if name in TRACED:
        assert traced.fingerprint.refused is None


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < (2, 12), reason="Dynamo 2.11 traces no such property")  # type: ignore[operator]
def test_a_property_of_a_metaclass_that_has_changed_is_followed(tmp_path: Path, change: Callable[[], None]) -> None:
    read = NOT_TRACED["a property of a metaclass"]
    with part.recording(tmp_path):
        before = answer(compiled_llm.wrap(model_that_reads(read), **FEW_PAGES))
    change()
    with taking(tmp_path), graphs_run():
        model = compiled_llm.wrap(model_that_reads(read), **FEW_PAGES)
        assert answer(model) == answer(model_that_reads(read)) != before
    assert "kept" not in model.compiled.stats().programs.values()
    assert {*model.compiled.stats().programs} <= {*part.not_kept(tmp_path)}


# ---- the question of each step


class Descriptor:
    def __get__(self, owner: object, kind: type | None = None) -> int:
        return 3


class Meta(type):
    computed = property(lambda cls: 3)
    absent = property(lambda cls: None)
    chosen = property(lambda cls: ONES)
    described = Descriptor()
    hidden = property(lambda cls: 3)

    def __getattr__(cls, name: str) -> int:
        if name == "made":
            return 3
        raise AttributeError(name)


class Owner(metaclass=Meta):
    stored = 3
    listed = ONES
    hidden = 3
    of_class = Descriptor()

    @staticmethod
    def static() -> None:
        """Do nothing."""


class Kind(enum.Enum):
    ONE = 1

    @property
    def twice(self) -> int:
        return 2


def covers(owner: Any, name: str) -> bool:
    walk = Walk(nn.Linear(1, 1), (), ())
    for value in (owner, type(owner), ONES, Owner.static):
        walk.open(value)
    way = (Step("G['Owner']", "Owner", owner), Step(f"G['Owner'].{name}", name, getattr(owner, name)))
    return not coverage.uncovered([Guarded("EQUALS_MATCH", way[-1].expression, way)], walk, ())


@pytest.mark.parametrize("name", ["stored", "listed", "static", "__name__"])
def test_what_an_owner_stores_is_covered_by_it(name: str) -> None:
    assert covers(Owner, name)


@pytest.mark.parametrize("name", ["computed", "absent", "chosen", "described", "hidden", "made", "of_class"])
def test_what_is_computed_is_not_covered_by_its_owner(name: str) -> None:
    assert not covers(Owner, name)


def test_an_entry_of_an_enumeration_covers_its_name_and_value_alone() -> None:
    walk = Walk(nn.Linear(1, 1), (), ())
    walk.open(Kind)
    outer = (Step("G['Kind']", "Kind", Kind), Step("G['Kind'].ONE", "ONE", Kind.ONE))
    read = [Step(f"G['Kind'].ONE.{name}", name, getattr(Kind.ONE, name)) for name in ("value", "name", "twice")]
    found = coverage.uncovered([Guarded("EQUALS_MATCH", step.expression, (*outer, step)) for step in read], walk, ())
    assert found == ["G['Kind'].ONE.twice"]
