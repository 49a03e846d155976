"""The report of `compiled-llm doctor`: a line for each finding, under the heading of its part, or JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterable, Sequence
from itertools import groupby

import typer
from rich.console import Console
from rich.text import Text

from compiled_llm import __version__
from compiled_llm.commands.doctor.checks import examine, has_cuda
from compiled_llm.commands.doctor.finding import DoctorFinding
from compiled_llm.commands.doctor.trial import try_builds
from compiled_llm.commands.importing import ended_by_ctrl_c
from compiled_llm.execution.reporting.progress import ProgressDisplay

_STYLES = {"ok": "green", "warning": "yellow", "missing": "yellow", "failed": "red"}
_INDENT = 14


def report(quick: bool = False, as_json: bool = False) -> bool:
    """Examine this machine and write what was found to stdout, progress to stderr.

    Args:
        quick: do not try to build kernels.
        as_json: write one JSON object.

    Returns:
        Whether compiled_llm can run here, on CUDA if there is a device, else on the CPU.
    """
    console = Console(file=sys.stdout, highlight=False, quiet=as_json)
    with contextlib.redirect_stdout(sys.stderr):  # whatever a library prints is no part of the report
        with ProgressDisplay(enabled=True).task("looking at this machine"), ended_by_ctrl_c():
            cuda = has_cuda()
            findings = list(examine(cuda))
        for part, found in groupby(findings, key=lambda finding: finding.part):
            _print(console, part, found)
        if not quick and _can_run(findings):
            for number, finding in enumerate(try_builds(cuda)):
                findings.append(finding)
                _print(console, "" if number else finding.part, [finding])
    can_run, verdict = _can_run(findings), _verdict(findings, cuda)
    console.print(Text(verdict, "bold green" if can_run else "bold red"), soft_wrap=True)
    if as_json:
        head = {"compiled_llm": __version__, "device": "cuda" if cuda else "cpu", "can_run": can_run}
        entries = [dataclasses.asdict(finding) for finding in findings]
        typer.echo(json.dumps({**head, "verdict": verdict, "findings": entries}, indent=2))
    return can_run


def _can_run(findings: Iterable[DoctorFinding]) -> bool:
    return not any(finding.prevents for finding in findings)


def _verdict(findings: Sequence[DoctorFinding], cuda: bool) -> str:
    where = "on CUDA" if cuda else "on the CPU"
    if wrong := [f"{finding.name} ({finding.status})" for finding in findings if finding.prevents]:
        return f"compiled_llm cannot run here {where}: {', '.join(wrong)}"
    tried = any(finding.part == "kernel builds" for finding in findings)
    return f"compiled_llm can run here, {where}" + ("" if tried else "; whether kernels build was not tried")


def _print(console: Console, heading: str, findings: Iterable[DoctorFinding]) -> None:
    """Write a line for each finding; one too long for a terminal goes on in its column."""
    if heading:
        console.print(Text(heading, "bold"))
    for finding in findings:
        style = "red" if finding.prevents else _STYLES.get(finding.status, "dim")
        seconds = "" if finding.seconds is None else f", {finding.seconds:.1f} s"
        what = Text(f"{finding.name}: {finding.detail}{seconds}")
        what.append(f" -> {finding.fix}" if finding.fix else "", "cyan")
        if console.is_terminal:
            lines = what.wrap(console, max(console.width - _INDENT, 1))
            what = Text("\n" + " " * _INDENT).join(lines)
        console.print(Text.assemble("  ", (f"{finding.status:<10}", style), "  ", what), soft_wrap=True)
