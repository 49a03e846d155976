"""Of grids of cases that are marked ``drawn``, a run has some by its seed, and with `--whole` all.

What it leaves out is counted by reason, and skipped where nothing else is asked for.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from support import drawing
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


def test_of_cases_that_are_alike_there_are_so_many_at_most() -> None:
    few = [drawn(GRID, str(seed), most=2) for seed in range(50)]
    assert {len(chosen) for chosen in few} == {2}
    assert set().union(*few) == set(range(len(GRID)))
    assert drawn(GRID, "0", most=100) == drawn(GRID, "0")


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

@pytest.mark.gpu
@pytest.mark.parametrize("late", [False, True])
def test_on_a_device(late): pass

@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.either("reading")) for name in ("once", "late")])
def reading(request): pass

@pytest.mark.parametrize("size", range(3))
def test_either(size, reading): pass
"""


CONFTEST = f"""
import sys
sys.path.insert(0, {str(Path(drawing.__file__).parents[1])!r})
from support.left_out import LeftOut

def pytest_addoption(parser):
    parser.addoption("--whole", action="store_true")
    parser.addoption("--most", type=int)

def pytest_configure(config):
    most = config.getoption("--most")
    config.pluginmanager.register(LeftOut(device=False, whole=config.getoption("--whole"), seed=7, most=most))
"""


@pytest.fixture
def run(pytester: pytest.Pytester) -> Callable[..., pytest.RunResult]:
    pytester.makeini("[pytest]\nmarkers =\n    drawn: some\n    either: one\n    gpu: none here\n    whole: all\n")
    pytester.makeconftest(CONFTEST)
    path = pytester.makepyfile(SOME)
    return lambda *options: pytester.runpytest_inprocess(path, "-p", "no:cacheprovider", "-rs", *options)


def test_all_is_run_with_whole_but_what_needs_a_device(run: Callable[..., pytest.RunResult]) -> None:
    result = run("--whole")
    result.assert_outcomes(passed=12 + 8 + 6, deselected=2)
    result.stdout.fnmatch_lines(["LEFT OUT ?2? need a CUDA device"])
    assert "need --whole" not in result.stdout.str()


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["one process", "workers"])
def test_what_is_left_out_is_counted_by_reason(workers: tuple[str, ...], run: Callable[..., pytest.RunResult]) -> None:
    result = run(*workers)
    passed = result.parseoutcomes()["passed"]
    assert 4 + 8 + 3 <= passed <= 6 + 8 + 3
    result.stdout.fnmatch_lines_random(
        [
            "LEFT OUT ?2? need a CUDA device",
            "LEFT OUT ?4? need --whole",
            f"LEFT OUT ?{8 + 8 + 6 - passed}? were not drawn with --seed 7 and need --whole",
        ]
    )


def test_there_may_be_so_many_cases_of_any_test(run: Callable[..., pytest.RunResult]) -> None:
    run("--most", "2").assert_outcomes(passed=2 + 2 + 2, deselected=22)
    run("--most", "2", "--whole").assert_outcomes(passed=12 + 8 + 6, deselected=2)


def test_one_case_alone_is_drawn_and_run(run: Callable[..., pytest.RunResult]) -> None:
    run("-k", "a-2").assert_outcomes(passed=1, deselected=27)


def test_of_cases_that_differ_in_one_way_alone_one_is_run(run: Callable[..., pytest.RunResult]) -> None:
    result = run("-k", "test_either", "-v")
    for size in range(3):
        result.stdout.re_match_lines_random([rf".*test_either\[(once|late)-{size}\] PASSED.*"])
    result.assert_outcomes(passed=3, deselected=25)
    run("-k", "test_either and late-1").assert_outcomes(passed=1, deselected=27)


def test_what_alone_is_asked_for_is_skipped_with_the_reason(run: Callable[..., pytest.RunResult]) -> None:
    result = run("-k", "b-2")
    result.assert_outcomes(skipped=1, deselected=27)
    result.stdout.fnmatch_lines(["*need --whole*"])
