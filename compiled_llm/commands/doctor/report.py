"""All that `compiled-llm doctor` looks at, and its report: a line for each finding, or JSON.

No finding may depend on another's health: torch and the rest are imported inside each check, and a check that fails
says so in its finding.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import TypeAlias

import typer
from rich.console import Console
from rich.text import Text

from compiled_llm import __version__
from compiled_llm.commands.doctor import machine, packages
from compiled_llm.commands.doctor.finding import DoctorFinding, Outcome, essence
from compiled_llm.commands.doctor.trial import try_builds
from compiled_llm.commands.importing import ended_by_ctrl_c
from compiled_llm.env import Env
from compiled_llm.execution.reporting.progress import ProgressDisplay

_STYLES = {"ok": "green", "warning": "yellow", "missing": "yellow", "failed": "red"}
_INDENT = 14

Check: TypeAlias = tuple[str, str, Callable[[], Outcome], bool]
"""A part, a name, what looks at it, and whether nothing runs without it."""


def report(quick: bool = False, as_json: bool = False) -> bool:
    """Examine this machine and write what was found to stdout, progress to stderr.

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
    if heading:
        console.print(Text(heading, "bold"))
    for finding in findings:
        style = "red" if finding.prevents else _STYLES.get(finding.status, "dim")
        seconds = "" if finding.seconds is None else f", {finding.seconds:.1f} s"
        what = Text(f"{finding.name}: {finding.detail}{seconds}")
        what.append(f" -> {finding.fix}" if finding.fix else "", "cyan")
        if console.is_terminal:  # where a long line goes on in its column
            lines = what.wrap(console, max(console.width - _INDENT, 1))
            what = Text("\n" + " " * _INDENT).join(lines)
        console.print(Text.assemble("  ", (f"{finding.status:<10}", style), "  ", what), soft_wrap=True)


def examine(cuda: bool) -> Iterator[DoctorFinding]:
    """Return a finding for each thing that compiled_llm uses, on CUDA or on the CPU."""
    return map(found_by, checks(cuda))


def found_by(check: Check) -> DoctorFinding:
    part, name, look, needed = check
    try:
        outcome = look()
    except Exception as error:
        outcome = Outcome("warning", f"cannot be checked: {essence(error)}")
    return DoctorFinding(part, name, *outcome, needed=needed and outcome.status != "not needed")


def has_cuda() -> bool:
    try:
        import torch

        return torch.cuda.is_available()
    except Exception:  # the finding about torch says why
        return False


def checks(cuda: bool) -> Iterator[Check]:
    yield "packages", "Python", packages.python, True
    yield "packages", "compiled_llm", packages.ourselves, True
    for package in packages.REQUIRED:
        yield "packages", package.module, partial(packages.imported, package), True
    yield "packages", "flashinfer", partial(packages.flashinfer, cuda), cuda
    triton = partial(packages.imported, packages.TRITON, "missing" if cuda else "not needed")
    yield "packages", "triton", triton, cuda
    yield "devices", "NVIDIA driver", machine.nvidia_driver, False
    yield from _gpus() if cuda else [("devices", "CUDA", machine.no_gpu, False)]
    yield "devices", "CPU", partial(machine.cpu, cuda), False
    yield "compilers", "C++ compiler", machine.cxx, True
    yield "compilers", "Python headers", machine.python_headers, True
    yield "compilers", "nvcc", partial(machine.cuda_tool, "nvcc", cuda), cuda
    yield "compilers", "ninja", partial(machine.cuda_tool, "ninja", cuda), cuda
    yield "caches", "compiled_llm", lambda: machine.cache(Env.from_environ().cache, "COMPILED_LLM_CACHE"), False
    yield "caches", "Inductor", machine.inductor_cache, False
    yield "caches", "FlashInfer", machine.flashinfer_cache, False
    for package in packages.OPTIONAL:
        yield "extras", package.module, partial(packages.imported, package, "optional"), False


def _gpus() -> Iterator[Check]:
    import torch

    for index in range(torch.cuda.device_count()):  # `cuda` stands for the first
        yield "devices", f"cuda:{index}", partial(machine.gpu, index), index == 0
