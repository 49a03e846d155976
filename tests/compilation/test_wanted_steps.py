"""The steps that are to be captured while others run: which comes first, and when."""

from __future__ import annotations

from compiled_llm.compilation.graphs.step_key import StepKey
from compiled_llm.compilation.graphs.wanted_steps import WantedSteps

DECODE, OTHER, PREFILL = StepKey.decode(8), StepKey.decode(64), StepKey.prefill(128, 8)


def wanted(*steps: StepKey, padded: tuple[StepKey, ...] = ()) -> WantedSteps:
    """Of one launch; those that are ``padded`` have run in larger ones."""
    found = WantedSteps()
    for step in steps:
        found.add(step, lambda: None, step in padded)
    return found


def taken(found: WantedSteps, settled: bool = True) -> StepKey | None:
    step = found.take(settled)
    return None if step is None else step[0]


def test_decode_steps_come_before_prefills_and_both_before_those_that_run_in_larger_ones() -> None:
    found = wanted(OTHER, DECODE, PREFILL, StepKey.prefill(64, 8), padded=(OTHER, StepKey.prefill(64, 8)))
    assert [taken(found) for _ in range(4)] == [DECODE, PREFILL, OTHER, StepKey.prefill(64, 8)]
    assert taken(found) is None
    assert not found


def test_the_newest_of_equals_is_first_and_waits_for_another_launch_beside_prompts() -> None:
    found = wanted(DECODE)
    found.launched()
    found.add(OTHER, lambda: None, False)
    assert taken(found, settled=False) is None, "nor is the older one: it may have run but once"
    found.launched()
    assert taken(found, settled=False) == OTHER
    assert taken(found, settled=False) == DECODE


def test_a_step_that_is_wanted_again_is_the_newest_and_has_waited() -> None:
    found = wanted(DECODE, OTHER)
    found.launched()
    again: list[str] = []
    found.add(DECODE, lambda: again.append("begun"), False)
    step = found.take(settled=False)
    assert step is not None
    assert step[0] == DECODE
    step[1]()
    assert again, "by the latest launch's"


def test_the_oldest_of_the_least_urgent_are_given_up() -> None:
    found = wanted(*(StepKey.prefill(tokens, 8) for tokens in (16, 32)), *map(StepKey.decode, range(1, 9)))
    assert [taken(found) for _ in range(len(found))] == [StepKey.decode(rows) for rows in range(8, 0, -1)]
