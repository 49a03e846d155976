"""What `compiled-llm doctor` shows: a table on a terminal, lines in a pipe, or JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterable, Sequence
from typing import Protocol

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from compiled_llm import __version__
from compiled_llm.commands.doctor.findings import Finding, examine, has_cuda
from compiled_llm.commands.doctor.trial import try_builds
from compiled_llm.execution.progress import ProgressDisplay

_STYLES = {"ok": "green", "warning": "yellow", "missing": "yellow", "failed": "red", "not needed": "dim"}
_NAME_WIDTH, _STATUS_WIDTH = 15, 10


def report(quick: bool = False, as_json: bool = False) -> bool:
    """Examine this machine and write what was found to stdout, progress to stderr.

    Args:
        quick: do not try to build kernels.
        as_json: write one JSON object.

    Returns:
        Whether compiled_llm can run here, on CUDA if there is a device, else on the CPU.
    """
    view = _view(as_json)
    findings: list[Finding] = []
    with contextlib.redirect_stdout(sys.stderr):  # whatever a library prints is no part of the report
        with ProgressDisplay(enabled=True).task("looking at this machine"):
            cuda = has_cuda()
            findings.extend(examine(cuda))
        view.show(findings)
        if not quick and _can_run(findings):
            for finding in try_builds(cuda):
                findings.append(finding)
                view.show([finding])
    view.end(findings, cuda)
    return _can_run(findings)


def _can_run(findings: Iterable[Finding]) -> bool:
    return not any(finding.prevents for finding in findings)


def _verdict(findings: Sequence[Finding], cuda: bool) -> str:
    where = "on CUDA" if cuda else "on the CPU"
    if wrong := [f"{finding.name} ({finding.status})" for finding in findings if finding.prevents]:
        return f"compiled_llm cannot run here {where}: {', '.join(wrong)}"
    tried = any(finding.part == "kernel builds" for finding in findings)
    return f"compiled_llm can run here, {where}" + ("" if tried else "; whether kernels build was not tried")


class _View(Protocol):
    def show(self, findings: Sequence[Finding]) -> None:
        """Show some findings."""

    def end(self, findings: Sequence[Finding], cuda: bool) -> None:
        """Show what all of them come to."""


def _view(as_json: bool) -> _View:
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    if as_json:
        return _Json(console)
    return _Tables(console) if console.is_terminal else _Lines(console)


class _Tables:
    """A table for each part, its heading first."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._part = ""

    def show(self, findings: Sequence[Finding]) -> None:
        for part in dict.fromkeys(finding.part for finding in findings):
            if part != self._part:
                self._console.print(f"\n[bold]{part}[/bold]")
                self._part = part
            self._console.print(_table([finding for finding in findings if finding.part == part]), soft_wrap=False)

    def end(self, findings: Sequence[Finding], cuda: bool) -> None:
        style = "bold green" if _can_run(findings) else "bold red"
        self._console.print("\n", Text(_verdict(findings, cuda), style), sep="")


def _detail(finding: Finding) -> str:
    return finding.detail if finding.seconds is None else f"{finding.detail}, {finding.seconds:.1f} s"


def _table(findings: Iterable[Finding]) -> Table:
    table = Table(box=None, show_header=False)
    table.add_column(width=_NAME_WIDTH)
    table.add_column(width=_STATUS_WIDTH)
    table.add_column(overflow="fold")
    for finding in findings:
        style = "red" if finding.prevents else _STYLES[finding.status]
        detail = Text(_detail(finding), "dim" if finding.status == "not needed" else "")
        if finding.fix:
            detail.append(f"\n→ {finding.fix}", "cyan")
        table.add_row(Text(finding.name), Text(finding.status, style), detail)
    return table


class _Lines:
    """A line for each finding."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def show(self, findings: Sequence[Finding]) -> None:
        for finding in findings:
            fix = f" -> {finding.fix}" if finding.fix else ""
            line = f"{finding.status:<{_STATUS_WIDTH}}  {finding.part}: {finding.name}: {_detail(finding)}{fix}"
            self._console.print(line, markup=False)

    def end(self, findings: Sequence[Finding], cuda: bool) -> None:
        self._console.print(_verdict(findings, cuda))


class _Json:
    """One object at the end."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def show(self, findings: Sequence[Finding]) -> None:
        pass

    def end(self, findings: Sequence[Finding], cuda: bool) -> None:
        result = {
            "compiled_llm": __version__,
            "device": "cuda" if cuda else "cpu",
            "can_run": _can_run(findings),
            "verdict": _verdict(findings, cuda),
            "findings": [dataclasses.asdict(finding) for finding in findings],
        }
        typer.echo(json.dumps(result, indent=2), file=self._console.file)
