"""What loads cost under the engine's policy of admission, next to the rule before it, vLLM's, and an oracle.

A simulation counts steps, and tokens that are computed again (``support/engine/admission_simulation.py``).
"""

from __future__ import annotations

import inspect
import math
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from compiled_llm.engine.admission import peak
from compiled_llm.engine.admission.cheaper import Cheaper
from compiled_llm.engine.admission.greedy import Greedy
from compiled_llm.engine.admission.peak import Peak
from compiled_llm.engine.admission.policies import POLICIES
from compiled_llm.engine.admission.state import Admission
from compiled_llm.engine.steps import admissions, scheduler
from compiled_llm.engine.steps.scheduler import Scheduler
from support.engine.admission_loads import KINDS, PAGE_SIZE, UNKNOWN, Load, drawn
from support.engine.admission_simulation import Asked, Cost, Oracle, Rule, Simulation, Vllm, costs
from support.engine.scheduled_load import Recounted, run

pytestmark = pytest.mark.core

PAGE = Path(__file__).parents[2] / "docs/design/engine.md"
RULES: dict[str, Callable[[], Rule]] = {
    "the sum": Rule,
    "vLLM's": Vllm,
    "an oracle": Oracle,
    "ours": lambda: Asked(Cheaper()),
}
FEW = (
    *("equal, short prompts, 1/4", "uniform, 1/4"),
    *("two lengths, short prompts, 3/4", "geometric, 1/4"),
)
"""Kinds that a run without ``--whole`` has: waiting costs most in some, beginning in others."""


def compared(kinds: tuple[str, ...], seeds: range) -> dict[str, dict[str, list[list[Cost]]]]:
    """By kind and rule, for each seed, what the second and third load cost; rules learn from the first."""
    found: dict[str, dict[str, list[list[Cost]]]] = {}
    for kind in kinds:
        loads = {seed: [drawn(kind, seed, part) for part in range(3)] for seed in seeds}
        found[kind] = {name: [costs(loads[seed], rule())[1:] for seed in seeds] for name, rule in RULES.items()}
    return found


def ratios(by_rule: dict[str, list[list[Cost]]], name: str) -> list[float]:
    """For each seed, a rule's cost as a multiple of the cheapest of the others'."""
    totals = {rule: [sum(cost.total for cost in later) for later in seeds] for rule, seeds in by_rule.items()}
    others = (totals[rule] for rule in totals if rule != "ours")
    return [own / least for own, least in zip(totals[name], map(min, *others), strict=True)]


def again(by_rule: dict[str, list[list[Cost]]], name: str) -> float:
    """The share of tokens that a rule computes again."""
    later = [cost for seeds in by_rule[name] for cost in seeds]
    return sum(cost.again for cost in later) / sum(cost.tokens for cost in later)


@pytest.mark.whole
def test_loads_cost_no_more_than_under_the_cheapest_rule(seed: int, whole: bool) -> None:
    """Within 2% in the median, and 5% in each kind of load."""
    seeds = range(seed, seed + (5 if whole else 1))
    print("seeds", *seeds)
    found = compared(tuple(KINDS) if whole else FEW, seeds)
    lines = ["| load | " + " | ".join(RULES) + " |", *(line_of(kind, by_rule) for kind, by_rule in found.items())]
    print(*lines, sep="\n")
    ours = {kind: ratios(by_rule, "ours") for kind, by_rule in found.items()}
    assert statistics.median(ratio for of_kind in ours.values() for ratio in of_kind) <= 1.02
    for kind, of_kind in ours.items():
        assert statistics.mean(of_kind) <= 1.05, kind
    if whole and seed == 0:
        known = set(PAGE.read_text().splitlines())
        assert not [line for line in lines if line not in known], "the page has other figures"


def line_of(kind: str, by_rule: dict[str, list[list[Cost]]]) -> str:
    cells = (f"{statistics.mean(ratios(by_rule, name)):.2f}, {again(by_rule, name):.0%}" for name in RULES)
    return f"| {kind} | " + " | ".join(cells) + " |"


@pytest.mark.whole
@pytest.mark.parametrize("exact", [True, False])
def test_the_load_of_the_benchmark_takes_as_long_each_time(exact: bool) -> None:
    """``tools/bench/offline.py --kv-memory 0.75x``, with lengths that a policy may know and without."""
    draw, lengths = random.Random(0), list[int]()
    for _ in range(256):
        lengths.append(draw.randint(100, 1024))
        for _ in range(lengths[-1]):
            draw.randint(0, 10_000)  # a token
    prompts, answers = np.array(lengths), np.array([draw.randint(100, 1024) for _ in range(256)])
    pages = math.ceil(3 / 4 * (-(-(prompts + answers) // PAGE_SIZE)).sum())
    none = np.zeros(256, np.int64)
    most = answers if exact else none + UNKNOWN
    load = Load(prompts, answers, most, exact, none, none, none - 1, 0, pages, None)
    assert [cost.steps for cost in costs([load] * 4, Asked(Cheaper()))] == [1041] * 4
    assert [cost.steps for cost in costs([load] * 2, Rule())] == ([1041, 1379] if exact else [1041, 1483])


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize(
    ("kind", "within"),
    [
        ("geometric, 1/4", 0.02),
        ("two lengths, exact, 1/4", 0.02),
        ("shared beginnings, 1/2", 0.03),  # some beginnings are there twice for a while
        ("states, 1/2", 0.02),
    ],
)
def test_the_scheduler_runs_as_many_steps_as_the_simulation(kind: str, within: float, seed: int) -> None:
    load = drawn(kind, seed, count=192)
    simulated = Simulation(load, Asked(Cheaper())).run()
    scheduled = run(load, Cheaper(), seed)
    print(simulated, scheduled)
    assert abs(scheduled.steps - simulated.steps) <= within * simulated.steps


@given(
    kind=st.sampled_from(sorted(KINDS)),
    seed=st.integers(0, 1000),
    count=st.integers(1, 24),
    share=st.floats(0.3, 1.2),
    policy=st.sampled_from(sorted(POLICIES)),
)
def test_whatever_the_load_all_end_in_order_and_no_page_is_lost(
    kind: str, seed: int, count: int, share: float, policy: str
) -> None:
    load = drawn(kind, seed, count=count)
    prompts, answers = load.prompts // 8 + load.shared, load.answers // 8 + 1
    pages = -(-(prompts + answers) // PAGE_SIZE)
    enough = max(int(share * pages.sum()), int(pages.max()))
    most = answers if load.exact else pages.max() * PAGE_SIZE - prompts
    states = None if load.states is None else 2 * count
    small = load._replace(prompts=prompts, answers=answers, max_tokens=most, pages=enough, states=states)
    cost = run(small, POLICIES[policy](), seed)
    assert cost.preemptions == 0 or enough < pages.sum()


def test_lengths_that_are_known_cost_no_row_its_pages(seed: int) -> None:
    """Under the peak alone."""
    assert known_under(Peak(), seed).preemptions == 0


def known_under(policy: Admission, seed: int) -> Cost:
    return run(drawn("uniform, exact, 3/4", seed, count=64)._replace(pages=1500), policy)


def test_who_lost_its_pages_twice_goes_on_as_long_as_another_can_be_taken(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    preempt, chosen = Scheduler.preempt, 0

    def watched(self: Scheduler) -> None:
        nonlocal chosen
        before = {request: request.preemptions for request in self.running}
        preempt(self)
        (victim,) = (request for request in before if request.row is None)
        others = [times for request, times in before.items() if request.priority == victim.priority]
        assert before[victim] < 2 or min(others) >= 2
        chosen += min(others) < 2 <= max(others)

    monkeypatch.setattr(Scheduler, "preempt", watched)
    for kind in ("uniform, 1/4", "bursts with priorities, 1/4"):
        run(drawn(kind, seed, count=64), Greedy(), seed)
    assert chosen, "there was no choice"


def test_a_policy_is_told_what_there_is(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admissions, "_COUNTED_AGAIN", 1)
    checked(seed)


def checked(seed: int) -> None:
    """Loads under a policy that counts again what it is told; with many preemptions, one with states."""
    run(drawn("shared beginnings, 1/2", seed, count=24), Recounted(Greedy()), seed)
    run(drawn("uniform, 1/4", seed, count=24), Recounted(Greedy()), seed)
    run(drawn("states, 1/2", seed, count=24)._replace(states=20), Recounted(Greedy()), seed)


FAULTS = {
    "cached pages count as used": ("_pool.available + own", "_pool.available - self._pool.account().cached + own"),
    "pages that others have are free when a row ends": (" - sum(shared)", ""),
    "rows that others begin with have their pages to themselves": ("state.pages -= more - int(counts[place])", "pass"),
    "only the last one to begin is looked at": ("range(self._found, len(self.requests))", "range(0)"),
    "rows end too early": ("- 1 - begun", "- 17 - begun"),
    "states are forgotten": ("(more if states is None else min(more, states.available // ENTRIES_OF_A_ROW))", "more"),
    "a preempted row has its old length": (
        "return len(request.prompt) + len(request.tokens)",
        "return len(request.prompt)",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_in_what_a_policy_is_told_are_found(fault: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = FAULTS[fault]
    faulty = planted(admissions, (old, new), ("_COUNTED_AGAIN = 40", "_COUNTED_AGAIN = 1"))
    monkeypatch.setattr(scheduler, "Admissions", faulty["Admissions"])
    with pytest.raises(AssertionError):
        checked(seed)


def test_a_peak_in_which_rows_end_too_early_is_found(seed: int) -> None:
    for fault in (("left >= at", "left > at"), ("drawn(rows, state.lengths, shifts)", "(rows.left - 16)[None]")):
        assert known_under(planted(peak, fault)["Peak"](), seed).preemptions > 0


def planted(module: ModuleType, *faults: tuple[str, str]) -> dict[str, Any]:
    """Return what a module has if other texts stand in it."""
    source = inspect.getsource(module)
    for old, new in faults:
        assert source.count(old) == 1, "plant it where it belongs now"
        source = source.replace(old, new)
    own: dict[str, Any] = {"__name__": module.__name__}
    exec(source, own)
    return own
