"""The history of a wrapped model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from compiled_llm.execution.lifecycle.runtime import Runtime
from compiled_llm.execution.reporting.events import ColdStart
from compiled_llm.explaining.advice import advise_change
from compiled_llm.explaining.checks.recompiles import recompiles_of
from compiled_llm.explaining.findings import Finding, Findings, general
from compiled_llm.explaining.profile.timings import Prompts, Timing, measure
from compiled_llm.explaining.report import Report
from compiled_llm.explaining.wording import cause_of, wait_of
from compiled_llm.model.places import blame, stack_in

_MOVED = (
    "Change weights in place (tensor.copy_, load_state_dict without assign=True), before warmup if they have to be "
    "exchanged."
)
_UNNAMED = "Set TORCH_LOGS=+cudagraphs, which says it for each CUDA graph, and report what it says."
_FULL = (
    "Keep what changes in a tensor, or call model.compiled.warmup() to compile for what holds then; "
    "torch._dynamo.config.recompile_limit is how often torch compiles a program."
)
_SHOWN = 5


def report_of(runtime: Runtime, timings: bool | Sequence[int] = False) -> Report:
    counters, found = history_of(runtime)
    timed = timings_of(runtime, timings) if timings else []
    facts = runtime.facts
    return Report.collect(facts.model, found, history=counters, timings=timed, packed_weights=facts.packed_weights)


def timings_of(runtime: Runtime, wanted: bool | Sequence[int], prompts: Prompts | None = None) -> list[Timing]:
    """Return where the time of a wrapped model's programs goes, at batch sizes or those in use; other calls wait."""
    sizes = (runtime.model_runner().steps.wanted_buckets or [1]) if wanted is True else list(wanted or ())
    runtime.check_sizes("timings", sizes)
    with runtime.loop_lock.taken():
        return measure(runtime.model_runner(), sizes, prompts, runtime.config.progress)


def history_of(runtime: Runtime) -> tuple[dict[str, Any], list[Finding]]:
    stats = dataclasses.asdict(runtime.stats())
    stats["pages"] = {} if stats["pages"] is None else stats["pages"]._asdict()
    again, moved = runtime.recaptures()
    stats |= {
        "upload_causes": dict(runtime.events.uploads),
        "recaptures": again,
        "cold_starts": [dataclasses.asdict(cold) for cold in runtime.events.cold_starts],
    }
    found = Findings()
    for call, reasons in (("generate", runtime.counters.slow_generates), ("forward", runtime.counters.slow_forwards)):
        for reason, count in list(reasons.items()):
            found.add(general("slow path", f"{call} took a slower path, {count} times: {reason}.", reason.advice))
    found.extend(_cold_starts(runtime.events.cold_starts))
    found.extend(map(_skipped, runtime.cudagraph_reasons()))
    if again:
        found.add(_captured_again(again, moved))
    for name, count in runtime.uncompiled().items():
        said = f"{name} ran uncompiled {count} times, because torch has compiled it as often as it will."
        found.add(general("recompile", said, _FULL))
    for name, function in runtime.programs().items():
        found.extend(recompiles_of(function, name, runtime.facts.model))
    return stats, found.sorted()


def _cold_starts(cold_starts: Sequence[ColdStart]) -> Iterator[Finding]:
    for cold in cold_starts:
        if cold.warmed:  # without a warmup, the first call of each size prepares it, as documented
            reason = f"{wait_of(cold).capitalize()} for {cold.what}: {cause_of(cold)}."
            advice = f"model.compiled.warmup([..., {cold.rows}]), after everything that changes the model."
            yield general("cold start", reason, advice)


def _skipped(said: str) -> Finding:
    reason, advice = advise_change(said)
    return Finding("no CUDA graph", blame(stack_in(said)), reason, advice, detail=said)


def _captured_again(count: int, moved: Sequence[str]) -> Finding:
    if not moved:
        reason = f"{count} CUDA graphs were captured again, for a reason that is not known."
        return general("captured again", reason, _UNNAMED)
    more = f" and {len(moved) - _SHOWN} more" if len(moved) > _SHOWN else ""
    names = f"{', '.join(moved[:_SHOWN])}{more}"
    reason = f"{count} CUDA graphs were captured again, because weights moved to other memory: {names}."
    return general("captured again", reason, _MOVED, detail="\n".join(moved))
