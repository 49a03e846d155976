"""Of grids of cases that are marked ``drawn``, a run has some by its seed, and with `--whole` all."""

from __future__ import annotations

import itertools
import random

import pytest

from support.drawing import drawn

pytest_plugins = ["pytester"]

GRID = [
    {("size", str(size)), ("kind", kind), ("late", late)}
    for size, kind, late in itertools.product(range(5), "abc", "01")
]


@pytest.mark.parametrize("seed", range(20))
def test_each_value_of_each_parameter_is_among_the_cases(seed: int) -> None:
    cases = random.Random(seed).sample(GRID, random.Random(seed).randint(1, len(GRID)))
    chosen = drawn(cases, str(seed))
    assert set().union(*(cases[number] for number in chosen)) == set().union(*cases)
    assert len(chosen) <= 5 + 3 + 2
    assert len(drawn(GRID, str(seed))) == 5, "as many as there are sizes, of which each is with another kind"


def test_seeds_draw_other_cases_and_one_seed_the_same() -> None:
    assert drawn(GRID, "1") == drawn(GRID, "1")
    assert len({frozenset(drawn(GRID, str(seed))) for seed in range(9)}) > 1
    assert set().union(*(drawn(GRID, str(seed)) for seed in range(50))) == set(range(len(GRID)))


def test_one_case_alone_is_drawn() -> None:
    assert drawn([{("size", "3"), ("kind", "c")}], "0") == {0}


SOME = """
import pytest

@pytest.mark.drawn
@pytest.mark.parametrize("size", range(4))
@pytest.mark.parametrize("kind", ["a", pytest.param("b", marks=pytest.mark.whole), "c"])
def test_drawn(size, kind): pass

@pytest.mark.parametrize("size", range(4))
@pytest.mark.parametrize("late", [False, True])
def test_all(size, late): pass
"""


@pytest.mark.parametrize("options", [(), ("--whole",), ("-k", "a-2")], ids=" ".join)
def test_what_is_not_drawn_is_skipped_with_the_seed(options: tuple[str, ...], pytester: pytest.Pytester) -> None:
    from support import drawing

    pytester.makeini("[pytest]\nmarkers =\n    drawn: some\n    whole: all\n")
    pytester.makeconftest(
        f"""
import sys
import pytest
sys.path.insert(0, {str(drawing.__file__.rpartition("support")[0])!r})
from support.drawing import leave_out_what_is_not_drawn

def pytest_addoption(parser):
    parser.addoption("--whole", action="store_true")

@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    if not config.getoption("--whole"):
        leave_out_what_is_not_drawn(items, 7)
"""
    )
    path = pytester.makepyfile(SOME)
    result = pytester.runpytest_inprocess(path, "-p", "no:cacheprovider", "-rs", *options)
    if options == ("--whole",):
        result.assert_outcomes(passed=12 + 8)
    elif options:
        result.assert_outcomes(passed=1, deselected=19)
    else:
        result.stdout.fnmatch_lines(["*not drawn with --seed 7; needs --whole*"])
        counts = result.parseoutcomes()
        assert 4 + 8 + 4 <= counts["passed"] <= 6 + 8 + 4  # of the whole ones, which the conftest alone leaves out
