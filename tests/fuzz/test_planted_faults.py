"""The cases that CI runs find faults that are planted, and what is printed shows them again."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace

import pytest

from compiled_llm.huggingface import paths
from compiled_llm.huggingface.cache.paged_cache import PagedCache
from compiled_llm.kvcache.pool import PagePool
from support.fuzzing.calls import Generate
from support.fuzzing.case import Case
from support.fuzzing.data import Prompt
from support.fuzzing.fuzz import Tally, first_difference, report, shrink
from support.fuzzing.random_cases import random_case

CASES = 20
pytestmark = pytest.mark.usefixtures("one_thread")


def beams_keep_their_rows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PagedCache, "reorder_cache", lambda self, beam_idx: None)


def min_p_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    read = paths.read_processors

    def forgetful(*args):
        settings = read(*args)
        return None if settings is None else [replace(setting, min_p=0.0) for setting in settings]

    patch.setattr(paths, "read_processors", forgetful)


def a_page_is_lost_when_a_call_fails(patch: pytest.MonkeyPatch) -> None:
    give_back = PagePool.give_back

    def losing(self: PagePool, pages: Iterable[int], reserved: int = 0) -> None:
        failing = sys.exc_info()[0] is not None
        give_back(self, list(pages)[1:] if failing else pages, reserved)

    patch.setattr(PagePool, "give_back", losing)


@pytest.mark.whole
@pytest.mark.parametrize(
    "plant", [pytest.param(min_p_is_forgotten, marks=pytest.mark.whole), a_page_is_lost_when_a_call_fails]
)
def test_a_planted_fault_is_found(plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert first_difference(iter(range(CASES)), 6, "eager", Tally()) is not None


@pytest.mark.whole
def test_a_planted_fault_is_found_and_what_is_printed_shows_it_again(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    beams_keep_their_rows(monkeypatch)
    seed = first_difference(iter(range(CASES)), 6, "eager", Tally())
    assert seed is not None
    printed = report(seed, 6, "eager", max_tried=4)
    assert f"pytest tests/fuzz --fuzz-seed={seed} " in printed
    capsys.readouterr()
    exec(printed[printed.index("from support") :], {})
    assert capsys.readouterr().out.strip() == printed[: printed.index("\n\nThe whole case")].strip()


def test_a_failing_case_becomes_as_small_as_it_can_be() -> None:
    case = random_case(10, steps=6)
    calls = (*case.steps, Generate(Prompt((5, 9), seed=3), {"num_beams": 3, "max_new_tokens": 4}), *case.steps)
    smallest = shrink(replace(case, steps=calls), lambda smaller: "'num_beams': 3" in repr(smaller), max_tried=10_000)
    assert smallest == Case(case.family, steps=(Generate(Prompt((1,)), {"num_beams": 3}),))
    assert eval(repr(smallest)) == smallest
