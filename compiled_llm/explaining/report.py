"""The report: text and plain data."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from rich.table import Column, Table
from transformers import PreTrainedModel

from compiled_llm.execution.reporting.plain_text import plain_text
from compiled_llm.explaining.findings import Finding
from compiled_llm.explaining.profile.timings import Timing
from compiled_llm.explaining.subject import head_rows, subject_of, title_of
from compiled_llm.explaining.tracing import Trace
from compiled_llm.explaining.wording import history_rows, timed_in, to_try
from compiled_llm.model.places import Place

_COLUMNS = 100
_LONGEST = 3
_HIDE_OTHERS = ("refused", "error", "graph break")


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
    def collect(
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
        return "\n\n".join(self._blocks())

    def _blocks(self) -> Iterator[str]:
        data = self.data
        yield f"{title_of(data)}\n{_named_values(head_rows(data).items())}"
        yield from _findings(data["findings"])
        if data["programs"]:
            yield _programs(data["programs"])
        yield from map(_timing, data["timings"])
        if data["history"] is not None:
            yield _named_values(history_rows(data["history"]))
        yield from map(_wrapped, data["notes"])


def _program(trace: Trace) -> dict[str, Any]:
    nodes = [node for graph in trace.graphs[:1] for node in graph.graph.nodes]
    calls = Counter(str(node.target) for node in nodes if node.op.startswith("call"))
    return {"whole": trace.error is None, "nodes": sum(calls.values()), "calls": dict(calls.most_common())}


def _findings(findings: list[dict[str, Any]]) -> Iterator[str]:
    causes = [finding for finding in findings if not finding["follows"]]
    consequences = [finding for finding in findings if finding["follows"]]
    counts = Counter(finding["kind"] for finding in causes)
    clean = "Every program is one graph: no line keeps this model from running whole."
    yield ", ".join(f"{count} x {kind}" for kind, count in counts.items()) or clean
    for number, finding in enumerate(causes, 1):
        yield "\n".join(_finding(number, finding))
    if consequences:
        breaks = f"{len(consequences)} more graph break{'s' * (len(consequences) > 1)}"
        lines = [f"{breaks}, seen only after the above and perhaps because of it:", *map(_place, consequences)]
        yield "\n".join(lines)
    if any(finding["kind"] in _HIDE_OTHERS for finding in findings):
        yield "More may show once this is mended: explain again then."


def _finding(number: int, finding: dict[str, Any]) -> Iterator[str]:
    programs = "; ".join(finding["programs"])  # some of whose names have commas in them
    yield f"{number}. {finding['kind']}" + (f" in {programs}" if programs else "")
    if finding["file"]:
        yield _place(finding)
    if finding["source"]:
        yield f"       {finding['source']}"
    yield _wrapped(finding["reason"], "   ")
    if what := finding["pinned_by"]:
        old = finding["old"]
        new = finding["new"]
        changed = f": {old or '?'} → {new or 'another'}" if old or new else ""
        yield _wrapped(f"the graph relies on {what}{changed}", "   ")
    yield _wrapped(f"→ {finding['advice']}", "   ")


def _place(finding: dict[str, Any]) -> str:
    return f"   {Place(finding['file'], finding['line'], finding['function'])}"


def _programs(programs: dict[str, Any]) -> str:
    table = Table("program", "one graph", "operations", box=None, pad_edge=False)
    for name, program in programs.items():
        table.add_row(name, "yes" if program["whole"] else "no", f"{program['nodes']:,}" if program["whole"] else "")
    return plain_text(table)


def _timing(timing: dict[str, Any]) -> str:
    on_cuda = timing["measured"] == "kernels"
    figures = (Column(name, justify="right") for name in ("launches" if on_cuda else "calls", "us", "of the step"))
    table = Table(timing["measured"], *figures, box=None, pad_edge=False)

    def add(name: str, launches: str, us: float) -> None:
        table.add_row(name, launches, f"{us:,.1f}", f"{us / timing['step_us']:.1%}")

    for kind in timing["kinds"]:
        add(kind["name"], f"{kind['launches']:.1f}", kind["us"])
    add("gaps: no kernel runs" if on_cuda else "the rest: compiled loops, Python", "", timing["gaps_us"])
    add("in all", f"{timing['launches']:.1f}", timing["step_us"])
    longest = ", ".join(f"{kernel['name'][:60]} {kernel['us']:,.0f} us" for kernel in timing["kernels"][:_LONGEST])
    lines = [timed_in(timing), plain_text(table), _wrapped(f"longest: {longest}")]
    if timing["host_us"] is not None:
        lines.append(f"Launching a step takes the host {timing['host_us']:,.0f} us.")
    if timing["program"] == "decode":
        lines.append(_wrapped(to_try(timing)))
    return "\n".join(lines)


def _named_values(rows: Iterable[tuple[str, str]]) -> str:
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in rows:
        table.add_row(name, value)
    return plain_text(table)


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, _COLUMNS, initial_indent=indent, subsequent_indent=indent, break_long_words=False)
