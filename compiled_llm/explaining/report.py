"""The report: text, page and plain data."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedModel

from compiled_llm.explaining.findings import Finding
from compiled_llm.explaining.places import Place
from compiled_llm.explaining.tracing import Trace


class Report:
    """What ``explain`` found.

    Attributes:
        data: all of it as dicts, lists, strings and numbers: ``model``, ``findings``, ``programs``, ``history``.
    """

    def __init__(self, data: dict[str, Any]) -> None:
        """Show ``data``."""
        self.data = data

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        findings: Sequence[Finding],
        traces: Sequence[Trace] = (),
        history: dict[str, Any] | None = None,
    ) -> Report:
        """Collect what was found."""
        return cls(
            {
                "model": type(model).__name__,
                "device": str(model.device),
                "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
                "findings": [finding.data() for finding in findings],
                "programs": {trace.name: _program(trace) for trace in traces},
                "history": history,
            }
        )

    @property
    def clean(self) -> bool:
        """Whether nothing is wrong."""
        return not self.data["findings"]

    def __str__(self) -> str:
        """The report as text."""
        console = Console(width=100, file=io.StringIO(), record=True)
        console.print(self)
        return "\n".join(line.rstrip() for line in console.export_text().splitlines())

    def __rich_console__(self, console: Console, options: Any) -> Iterator[RenderableType]:
        """For ``rich.print``."""
        data, findings = self.data, self.data["findings"]
        yield Text(f"{data['model']} on {data['device']}, torch {data['versions']['torch']}", "bold")
        yield _verdict(findings)
        for number, finding in enumerate(findings, 1):
            yield Text()
            yield from _finding(number, finding)
        if data["programs"]:
            yield Text()
            yield _programs(data["programs"])
        if data["history"] is not None:
            yield Text()
            yield _history(data["history"])

    def to_html(self, path: str | PathLike[str]) -> Path:
        """Write the report as one page that needs nothing else, and return its path."""
        from compiled_llm.explaining.page import page

        file = Path(path)
        file.write_text(page(self.data), encoding="utf-8")
        return file


def _program(trace: Trace) -> dict[str, Any]:
    nodes = [node for graph in trace.graphs[:1] for node in graph.graph.nodes]
    calls = Counter(str(node.target) for node in nodes if node.op.startswith("call"))
    return {"whole": trace.error is None, "nodes": sum(calls.values()), "calls": dict(calls.most_common())}


def _verdict(findings: list[dict[str, Any]]) -> Text:
    if not findings:
        return Text("Nothing stands in the way: every program is one graph.", "green")
    counts = Counter(finding["kind"] for finding in findings)
    return Text(", ".join(f"{count} x {kind}" for kind, count in counts.items()), "red")


def place_of(finding: dict[str, Any]) -> str:
    """Return where it is, in words."""
    return str(Place(finding["file"], finding["line"], finding["function"]))


def change_of(finding: dict[str, Any]) -> str:
    """Return what changed, in words; empty where nothing did."""
    if not finding["pinned_by"]:
        return ""
    values = f": {finding['old'] or '?'} → {finding['new'] or 'another'}" if finding["old"] or finding["new"] else ""
    return f"the graph relies on {finding['pinned_by']}{values}"


def _finding(number: int, finding: dict[str, Any]) -> Iterator[RenderableType]:
    programs = f" ({', '.join(finding['programs'])})" if finding["programs"] else ""
    after = ", seen after a graph break and perhaps only because of it" if finding["follows"] else ""
    yield Text(f"{number}. {finding['kind']}{programs}{after}", "bold")
    if finding["file"]:
        yield Padding(Text(place_of(finding), "cyan"), (0, 0, 0, 3))
    if finding["source"]:
        yield Padding(Text(finding["source"]), (0, 0, 0, 7))
    yield Padding(Text(finding["reason"]), (0, 0, 0, 3))
    if change := change_of(finding):
        yield Padding(Text(change), (0, 0, 0, 3))
    yield Padding(Text(f"→ {finding['advice']}", "green"), (0, 0, 0, 3))


def _programs(programs: dict[str, Any]) -> Table:
    table = Table("program", "one graph", "operations", box=None, pad_edge=False)
    for name, program in programs.items():
        table.add_row(name, "yes" if program["whole"] else "no", str(program["nodes"]))
    return table


def _history(history: dict[str, Any]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in history.items():
        if value not in ({}, [], None):
            shown = ", ".join(f"{key} {count}" for key, count in value.items()) if isinstance(value, dict) else value
            table.add_row(name.replace("_", " "), str(shown))
    return table
