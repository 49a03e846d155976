"""What has happened so far on a wrapped model."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from compiled_llm.explaining.advice import advise_change
from compiled_llm.explaining.findings import Finding, Findings, general
from compiled_llm.explaining.places import blame, stack_in
from compiled_llm.explaining.recompiles import recompiles_of
from compiled_llm.explaining.report import Report

if TYPE_CHECKING:
    from compiled_llm.runtime import CompiledModel

_SLOW = "This call feature is not in the fast loop. Leave it out where speed matters; the tokens are the same."


def report_of(runtime: CompiledModel) -> Report:
    """Return the report of what has happened so far."""
    counters, found = history_of(runtime)
    return Report.of(runtime.model(), found, history=counters)


def history_of(runtime: CompiledModel) -> tuple[dict[str, Any], list[Finding]]:
    """Return counters as plain data, and what slowed calls down."""
    stats = dataclasses.asdict(runtime.stats())
    stats["pages"] = {} if stats["pages"] is None else stats["pages"]._asdict()
    found = Findings()
    for reason, count in stats["slow_paths"].items():
        found.add(general("slow path", f"Not in the fast loop, {count} times: {reason}.", _SLOW))
    found.extend(map(_skipped, runtime.cudagraph_reasons()))
    for name, function in runtime.programs().items():
        found.extend(recompiles_of(function, name, runtime.model()))
    return stats, found.sorted()


def _skipped(said: str) -> Finding:
    reason, advice = advise_change(said)
    return Finding("no CUDA graph", blame(stack_in(said)), reason, advice, detail=said)
