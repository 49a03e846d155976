"""The report: text and plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text
from transformers import PreTrainedModel

from compiled_llm.execution.reporting.plain_text import plain_text
from compiled_llm.explaining.findings import Finding
from compiled_llm.explaining.profile.timings import Timing
from compiled_llm.explaining.subject import head_rows, subject_of, title_of
from compiled_llm.explaining.tracing import Trace
from compiled_llm.explaining.wording import (
    CLEAN,
    change_of,
    following,
    history_rows,
    more_of,
    place_of,
    programs_of,
    timed_in,
    to_try,
)

_LONGEST = 3


class Report:
    """The findings of ``explain``.

    Attributes:
        data: all of it as dicts, lists, strings and numbers: ``model``, ``name``, ``parameters``, ``dtype``,
            ``device``, ``machine``, ``versions``, ``date``, ``packed_weights``, ``findings``, ``programs``,
            ``timings``, ``history``, ``notes``.
    """

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        findings: Sequence[Finding],
        traces: Sequence[Trace] = (),
        history: dict[str, Any] | None = None,
        timings: Sequence[Timing] = (),
        notes: Sequence[str] = (),
        packed_weights: Mapping[str, int] = MappingProxyType({}),
    ) -> Report:
        """Collect findings, traces and timings of programs, and a wrapped model's counters (``history``)."""
        # ``packed_weights`` are as ``Stats.weights``.
        return cls(
            {
                **subject_of(model),
                "packed_weights": dict(packed_weights),
                "findings": [finding.data() for finding in findings],
                "programs": {trace.name: _program(trace) for trace in traces},
                "timings": [timing.data() for timing in timings],
                "history": history,
                "notes": list(notes),
            }
        )

    @property
    def clean(self) -> bool:
        """Whether nothing is wrong."""
        return not self.data["findings"]

    def __str__(self) -> str:
        return plain_text(self)

    def __rich_console__(self, console: Console, options: Any) -> Iterator[RenderableType]:
        data, findings = self.data, self.data["findings"]
        yield Text(title_of(data), "bold")
        yield _named_values(head_rows(data))
        yield Text()
        yield from _findings(findings)
        if data["programs"]:
            yield Text()
            yield _programs(data["programs"])
        for timing in data["timings"]:
            yield Text()
            yield from _timing(timing)
        if data["history"] is not None:
            yield Text()
            yield _named_values(dict(history_rows(data["history"])))
        for note in data["notes"]:
            yield Text()
            yield Text(note, "yellow")


def _program(trace: Trace) -> dict[str, Any]:
    nodes = [node for graph in trace.graphs[:1] for node in graph.graph.nodes]
    calls = Counter(str(node.target) for node in nodes if node.op.startswith("call"))
    return {"whole": trace.error is None, "nodes": sum(calls.values()), "calls": dict(calls.most_common())}


def _findings(findings: list[dict[str, Any]]) -> Iterator[RenderableType]:
    causes = [finding for finding in findings if not finding["follows"]]
    yield _verdict(causes)
    for number, finding in enumerate(causes, 1):
        yield Text()
        yield from _finding(number, finding)
    if consequences := [finding for finding in findings if finding["follows"]]:
        yield Text()
        yield Text(f"{following(consequences)}:", "dim")
        yield from (_indented(place_of(finding), "dim") for finding in consequences)
    if more := more_of(findings):
        yield Text()
        yield Text(more, "yellow")


def _verdict(findings: list[dict[str, Any]]) -> Text:
    if not findings:
        return Text(CLEAN, "green")
    counts = Counter(finding["kind"] for finding in findings)
    return Text(", ".join(f"{count} x {kind}" for kind, count in counts.items()), "red")


def _finding(number: int, finding: dict[str, Any]) -> Iterator[RenderableType]:
    yield Text(f"{number}. {finding['kind']} {programs_of(finding)}".rstrip(), "bold")
    if finding["file"]:
        yield _indented(place_of(finding), "cyan")
    if finding["source"]:
        yield _indented(finding["source"], by=7)
    yield _indented(finding["reason"])
    if change := change_of(finding):
        yield _indented(change)
    yield _indented(f"→ {finding['advice']}", "green")


def _indented(text: str, style: str = "", by: int = 3) -> Padding:
    return Padding(Text(text, style), (0, 0, 0, by))


def _programs(programs: dict[str, Any]) -> Table:
    table = Table("program", "one graph", "operations", box=None, pad_edge=False)
    for name, program in programs.items():
        table.add_row(name, *(("yes", f"{program['nodes']:,}") if program["whole"] else ("no",)))
    return table


def _timing(timing: dict[str, Any]) -> Iterator[RenderableType]:
    on_cuda = timing["measured"] == "kernels"
    figures = (Column(name, justify="right") for name in ("launches" if on_cuda else "calls", "us", "of the step"))
    table = Table(timing["measured"], *figures, box=None, pad_edge=False)

    def add(name: str, launches: str, us: float) -> None:
        table.add_row(name, launches, f"{us:,.1f}", f"{us / timing['step_us']:.1%}")

    for kind in timing["kinds"]:
        add(kind["name"], f"{kind['launches']:.1f}", kind["us"])
    add("gaps: no kernel runs" if on_cuda else "the rest: compiled loops, Python", "", timing["gaps_us"])
    add("in all", f"{timing['launches']:.1f}", timing["step_us"])
    yield Text(timed_in(timing), "bold")
    yield table
    longest = ", ".join(f"{kernel['name'][:60]} {kernel['us']:,.0f} us" for kernel in timing["kernels"][:_LONGEST])
    yield Text(f"longest: {longest}")
    if timing["host_us"] is not None:
        yield Text(f"Launching a step takes the host {timing['host_us']:,.0f} us.")
    if timing["program"] == "decode":
        yield Text(to_try(timing))


def _named_values(rows: dict[str, str]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in rows.items():
        table.add_row(name, value)
    return table
