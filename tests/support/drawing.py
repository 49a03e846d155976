"""Grids of cases, of which a run has a few: drawn by its seed, each value of each parameter among them.

Of cases that are alike, as a kernel's compiled sizes, ``drawn(most=2)`` has so many at most, those that differ first.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Hashable, Sequence, Set

import pytest

BY_READING = [
    pytest.param(reading, marks=pytest.mark.either("reading")) for reading in ("read at once", "read a step late")
]
"""Of fixtures that are called `reading`."""


def not_drawn(items: Sequence[pytest.Item], seed: int, most: int | None = None) -> list[pytest.Item]:
    """Return cases that a run leaves out of tests that are marked ``drawn``, and beyond ``most`` of any test."""
    grids: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and (
            item.get_closest_marker("drawn") or (most and hasattr(item, "callspec"))
        ):
            grids[item.nodeid.partition("[")[0]].append(item)
    found: list[pytest.Item] = []
    for name, cases in grids.items():
        cases.sort(key=lambda item: item.nodeid)
        mark = cases[0].get_closest_marker("drawn")
        bounds = [bound for bound in (most, mark and mark.kwargs.get("most")) if bound]
        chosen = drawn([values_of(case) for case in cases], f"{seed} {name}", min(bounds, default=None))
        found += [case for number, case in enumerate(cases) if number not in chosen]
    return found


def other_ways(items: Sequence[pytest.Item], seed: int) -> list[pytest.Item]:
    """Return cases that a run leaves out since it has another one, which differs in one parameter alone.

    The mark ``either`` names that parameter.
    """
    alike: dict[Hashable, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and (mark := item.get_closest_marker("either")):
            others = frozenset(value for value in values_of(item) if value[0] not in mark.args)
            alike[item.nodeid.partition("[")[0], others].append(item)
    found: list[pytest.Item] = []
    for cases in alike.values():
        cases.sort(key=lambda item: item.nodeid)
        cases.remove(random.Random(f"{seed} {cases[0].nodeid}").choice(cases))
        found += cases
    return found


def values_of(case: pytest.Function) -> set[tuple[str, str]]:
    """Return each parameter's name with what tells its values apart."""
    return {(name, repr(value)) for name, value in case.callspec.params.items()}


def drawn(cases: Sequence[Set[Hashable]], seed: str, most: int | None = None) -> set[int]:
    """Return the numbers of random cases, few of which together have each value that any case has, or ``most`` of them.

    The next one is always one of those with the most values that none has so far.
    """
    order = random.Random(seed).sample(range(len(cases)), len(cases))
    seen: set[Hashable] = set()
    found = set[int]()
    while len(found) != most and (unseen := [number for number in order if not cases[number] <= seen]):
        number = max(unseen, key=lambda number: len(cases[number] - seen))
        found.add(number)
        seen |= cases[number]
    return found
