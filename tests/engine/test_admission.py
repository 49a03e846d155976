"""What loads cost under the engine's policy of admission, next to the rule before it, vLLM's, and an oracle.

A simulation counts steps, and tokens that are computed again (``support/engine/admission_simulation.py``).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import pytest

from compiled_llm.engine.admission.cheaper import Cheaper
from support.engine.admission_loads import KINDS, drawn
from support.engine.admission_simulation import Asked, Cost, Oracle, Rule, Vllm, costs

pytestmark = pytest.mark.core

RULES: dict[str, Callable[[], Rule]] = {
    "the sum": Rule,
    "vLLM's": Vllm,
    "an oracle": Oracle,
    "ours": lambda: Asked(Cheaper()),
}
FEW = (
    *("equal, short prompts, 1/4", "uniform, 1/4"),
    *("two lengths, short prompts, 3/4", "shared beginnings, 1/2"),
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


def test_loads_cost_no_more_than_under_the_cheapest_rule(seed: int, whole: bool) -> None:
    """Within 2% in the median, and 5% in each kind of load."""
    seeds = range(seed, seed + (5 if whole else 1))
    print("seeds", *seeds)
    found = compared(tuple(KINDS) if whole else FEW, seeds)
    print("| load |", " | ".join(RULES), "|")
    for kind, by_rule in found.items():
        cells = (f"{statistics.mean(ratios(by_rule, name)):.2f}, {again(by_rule, name):.0%}" for name in RULES)
        print(f"| {kind} |", " | ".join(cells), "|")
    ours = {kind: ratios(by_rule, "ours") for kind, by_rule in found.items()}
    assert statistics.median(ratio for of_kind in ours.values() for ratio in of_kind) <= 1.02
    for kind, of_kind in ours.items():
        assert statistics.mean(of_kind) <= 1.05, kind
