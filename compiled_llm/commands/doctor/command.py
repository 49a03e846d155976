"""`compiled-llm doctor`. What imports torch is imported inside, so that --help is quick."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable
from itertools import groupby
from typing import Annotated

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from compiled_llm import __version__
from compiled_llm.commands.doctor.checks import DoctorFinding, checks
from compiled_llm.commands.errors import readable_errors
from compiled_llm.commands.importing import ended_by_ctrl_c
from compiled_llm.execution.reporting.progress import ProgressDisplay

_STYLES = {"ok": "green", "warning": "yellow", "missing": "yellow", "failed": "red"}
_ONE_LINE = 1_000  # columns that any finding fits into: in a pipe it is a line


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Write the report as one JSON object.")] = False,
) -> None:
    """Check this machine: what it has, and what is missing.

    Exit code 0 if compiled_llm can run here, on CUDA if there is a device, else on the CPU; 1 if not.
    """
    console = Console(file=sys.stdout, highlight=False, quiet=as_json)
    if not console.is_terminal:
        console.width = _ONE_LINE
    with readable_errors(), contextlib.redirect_stdout(sys.stderr):  # no print of a library is part of the report
        with ProgressDisplay(enabled=True).task("looking at this machine"), ended_by_ctrl_c():
            cuda = has_cuda()
            findings = examine(cuda)
        show(console, findings)
    where = "on CUDA" if cuda else "on the CPU"
    wrong = ", ".join(f"{finding.name} ({finding.status})" for finding in findings if finding.prevents)
    verdict = f"compiled_llm cannot run here {where}: {wrong}" if wrong else f"compiled_llm can run here, {where}"
    console.print(Text(verdict, "bold red" if wrong else "bold green"), soft_wrap=True)
    if as_json:
        head = {"compiled_llm": __version__, "device": "cuda" if cuda else "cpu", "can_run": not wrong}
        entries = [finding._asdict() for finding in findings]
        typer.echo(json.dumps({**head, "verdict": verdict, "findings": entries}, indent=2))
    raise typer.Exit(1 if wrong else 0)


def has_cuda() -> bool:
    try:
        import torch

        return torch.cuda.is_available()
    except Exception:  # the finding about torch says why
        return False


def examine(cuda: bool) -> list[DoctorFinding]:
    return [check.finding() for check in checks(cuda)]


def show(console: Console, findings: Iterable[DoctorFinding]) -> None:
    """Print a table of findings for each part; what is too long for a terminal goes on in its column."""
    for part, of_part in groupby(findings, key=lambda finding: finding.part):
        table = Table.grid(Column(width=10), Column(width=17), "", padding=(0, 2, 0, 0))
        for finding in of_part:
            style = "red" if finding.prevents else _STYLES.get(finding.status, "dim")
            fix = (f" -> {finding.fix}" if finding.fix else "", "cyan")
            what = Text.assemble(finding.detail, fix, overflow="fold")
            table.add_row(Text(finding.status, style), finding.name, what)
        console.print(Text(part, "bold"))
        with console.capture() as captured:
            console.print(Padding(table, (0, 0, 0, 2)))
        console.file.writelines(f"{line.rstrip()}\n" for line in captured.get().splitlines())
