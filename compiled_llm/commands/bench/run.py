"""One run of a bench command: it finds the contenders, and writes and prints the report."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from compiled_llm.commands.early_checks import check_driver
from compiled_llm.commands.errors import readable_errors
from compiled_llm.commands.loading.source import locate
from compiled_llm.commands.options.choices import Device

if TYPE_CHECKING:
    from compiled_llm.commands.bench.contender import Contender, Setup
    from compiled_llm.commands.bench.report import Report
    from compiled_llm.commands.bench.workload import Workload


class BenchRun:
    """What the commands share: device, contenders, and a report with the file that it goes to."""

    def __init__(self, json: Path | None, commit: str | None, log: Callable[[str], object]) -> None:
        self._json = json
        self._commit = commit
        self._log = log
        self.report: Report
        self.setup: Setup
        self.contenders: list[Contender]

    def use(self, device: Device) -> str:
        """Choose the device and the dtype that goes with it; return the device's type."""
        check_driver(device.value)
        from compiled_llm.commands.loading.load import device_of, dtype_of

        self._device = device_of(device.value)
        self._dtype = dtype_of("auto", self._device)
        return self._device.type

    def prepare(
        self, model: str, contenders: str, workloads: list[Workload], vllm: str | None, sglang: str | None
    ) -> None:
        """Find the contenders, and begin the report with what they run on."""
        from compiled_llm.commands.bench import contenders as known

        self.contenders = known.choose(contenders, self._device.type)
        self.begin(model, workloads, vllm, sglang)

    def begin(self, model: str, workloads: list[Workload], vllm: str | None, sglang: str | None = None) -> None:
        """Begin the report with what contenders run on."""
        from compiled_llm.commands.bench import machine, models
        from compiled_llm.commands.bench.contender import Setup
        from compiled_llm.commands.bench.report import Report

        if not models.is_random(model):
            locate(model, progress=False)  # or each contender would look for it
        commands = {name: command for name, command in (("vllm", vllm), ("sglang", sglang)) if command}
        self.setup = Setup(model, self._device, self._dtype, workloads, commands, self._log)
        described = {
            "name": model,
            "weights": "random" if models.is_random(model) else "its own",
            "dtype": str(self._dtype).removeprefix("torch."),
        }
        command = shlex.join(["compiled-llm", *sys.argv[1:]])
        self.report = Report(command, machine.describe(self._device, self._commit), described)

    def measure_bandwidth(self) -> None:
        """Measure the rate that results are compared with."""
        from compiled_llm.explaining.profile.bandwidth import read_bandwidth

        self._log("measuring the read bandwidth")
        self.report.read_bandwidth = read_bandwidth(self._device, self._dtype)
        self.setup.drop_model()

    def save(self) -> None:
        """Write what there is so far."""
        if self._json is not None:
            self.report.save(self._json)


@contextmanager
def bench_run(
    json: Path | None, markdown: Path | None, plot: Path | None, commit: str | None, verbose: bool
) -> Iterator[BenchRun]:
    """Let the block measure, then write and print what it found; exit code 1 if anything failed or nothing ran."""
    with readable_errors():
        if plot is not None:
            check_matplotlib("--plot")
        from compiled_llm.commands.bench.terminal import progress

        with progress(verbose) as log:
            run = BenchRun(json, commit, log)
            yield run
        run.save()
        write_report(run.report, markdown, plot)
        show_report(run.report)
    if run.report.failures or run.report.empty:
        raise typer.Exit(1)


def check_matplotlib(what: str) -> None:
    """Fail before measuring rather than after."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"{what} needs matplotlib: pip install '.[bench]' in the checkout")


def write_report(report: Report, markdown: Path | None, plot: Path | None) -> None:
    """Write the tables and the plot, if asked for."""
    if markdown is not None:
        from compiled_llm.commands.bench.markdown import render

        markdown.parent.mkdir(parents=True, exist_ok=True)
        markdown.write_text(render(report))
    if plot is not None and not report.empty:
        from compiled_llm.commands.bench.plot import draw

        plot.parent.mkdir(parents=True, exist_ok=True)
        draw(report, plot)


def show_report(report: Report) -> None:
    """Print the report."""
    from compiled_llm.commands.bench import terminal

    terminal.show(report)
