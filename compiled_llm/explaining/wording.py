"""The words of a report on timings and on history."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from compiled_llm.execution.reporting.events import ColdCause, ColdStart, UploadCause

UPLOAD_CAUSES: dict[UploadCause, str] = {
    "new_page": "a row came to pages that were not known ahead",
    "call_moved_in": "a call moved its rows in",
    "rows_changed": "rows joined, left or went back",
    "page_copied": "a row stopped sharing a page",
    "bucket_prepared": "a bucket was prepared",
}
COLD_CAUSES: dict[ColdCause, str] = {
    "warmup_not_called": "warmup was not called",
    "size_not_named": "warmup did not name a batch size of {rows}",
    "prepared_and_lost": (
        "the model was moved, converted, hooked or given more positions after warmup, or fused weights were replaced "
        "by ones that cannot be, which takes all that was prepared"
    ),
    "never_prepared": "warmup does not prepare it",
}
_TO_TRY = {
    "matrix products": "Weights are read once for all rows of a step, so that more rows at once cost little; weights "
    "of fewer bits take less to read (docs/how-to/quantised.md).",
    "attention": "Keys and values are read for each row: shorter prompts and answers take less.",
    "sampling": "Greedy answers, and fewer settings of sampling, take less.",
}
_GAPS = "Most of a step is the host's time: --mode cuda-graphs launches it as a whole, on a GPU."


def timed_in(timing: dict[str, Any]) -> str:
    rows = f"{timing['rows']} row{'s' * (timing['rows'] > 1)}"
    if timing["program"] == "prefill":
        return f"prefill of {rows}, {timing['tokens']} tokens"
    return f"decode, {rows} of about {timing['tokens']} tokens"


def to_try(timing: dict[str, Any]) -> str:
    """Return the kind of work that a decode step spends most of its time on, and what to try."""
    longest = timing["kinds"][0]
    said = f"{longest['us'] / timing['step_us']:.0%} of {timing['step_us']:,.0f} us goes to {longest['name']}."
    advice = _GAPS if timing["gaps_us"] > timing["step_us"] / 2 else _TO_TRY.get(longest["name"], "")
    return f"{said} {advice}".rstrip()


def wait_of(cold: ColdStart) -> str:
    return f"a call of {cold.rows} row{'s' * (cold.rows > 1)} waited {cold.seconds:.1f} s"


def cause_of(cold: ColdStart) -> str:
    return COLD_CAUSES[cold.cause].format(rows=cold.rows)


def history_rows(history: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in history.items():
        if name == "cold_starts":
            for cold in [ColdStart(**entry) for entry in value]:
                yield f"waited for {cold.what}", f"{wait_of(cold)}: {cause_of(cold)}"
        elif name == "upload_causes":
            for cause, count in value.items():
                yield f"uploads: {cause}", f"{count}, because {UPLOAD_CAUSES[cause]}"
        elif value not in ({}, [], None):
            shown = ", ".join(f"{key} {count}" for key, count in value.items()) if isinstance(value, dict) else value
            yield name.replace("_", " "), str(shown)
