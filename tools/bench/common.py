"""What every script does: options, a report of this machine, and one contender after the other."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tables  # noqa: F401  of all that these scripts measure
import torch
import typer
from models import build
from shapes import SHAPES

from compiled_llm.commands.bench.commands import finish, new_report, progress
from compiled_llm.commands.bench.contenders import C, Setup
from compiled_llm.commands.bench.report import BenchReport, failure
from compiled_llm.commands.bench.timing import Workload
from compiled_llm.commands.loading.load import device_of, dtype_of

CLOCKS = ("clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit", "temperature.gpu")
Model = Annotated[
    str, typer.Option("--model", help=f"Random weights in the shape of {', '.join(SHAPES)}; or a folder, or a hub id.")
]
DeviceName = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write all figures to this file, after each result.")]
Commit = Annotated[str | None, typer.Option("--commit", help="The commit to record, whatever git says.")]
AlsoFp8 = Annotated[
    str | None, typer.Option("--kv-dtype", help="fp8_e4m3: also each engine with keys and values in 8 bits.")
]
Contenders = Annotated[str, typer.Option("--contenders", help="Comma-separated; those that are unknown are listed.")]
Vllm = Annotated[
    str,
    typer.Option("--vllm", envvar="COMPILED_LLM_VLLM", help="A Python that has vLLM: 'env PYTHONPATH=... python3'."),
]


@dataclass
class Bench:
    """One run of a script."""

    setup: Setup
    report: BenchReport
    json: Path | None

    @property
    def is_cuda(self) -> bool:
        return self.setup.device.type == "cuda"

    def add(self, kind: str, result: dict[str, Any]) -> None:
        self.report.add(kind, result)
        self.save()

    def save(self) -> None:
        self.report.save(self.json)

    def each(self, contenders: Iterable[C], measure: Callable[[C], None]) -> None:
        """Measure every contender that can take part; one that fails keeps what it has."""
        for contender in contenders:
            if reason := contender.obstacle(self.setup):
                self.report.unavailable[contender.name] = reason
                continue
            self.setup.log(contender.name)
            try:
                measure(contender)
            except Exception as error:
                self.report.failures.append(failure(contender.name, error))
                self.setup.drop_model()  # its state is in doubt


@contextmanager
def bench(
    model: str,
    device: str,
    workloads: Sequence[Workload],
    json: Path | None,
    commit: str | None,
) -> Iterator[Bench]:
    """Let the block measure, then print what it found."""
    with progress() as log:
        where = device_of(device)
        dtype = dtype_of("auto", where)
        weights = "random" if model in SHAPES else "its own"
        report = new_report({"name": model, "weights": weights, "dtype": str(dtype).removeprefix("torch.")})
        report.command = shlex.join(["python", f"tools/bench/{Path(sys.argv[0]).name}", *sys.argv[1:]])
        report.machine["commit"] = commit or checkout()
        report.machine["cpu"]["threads"] = torch.get_num_threads()
        if where.type == "cuda":
            report.machine["gpu"].update(driver_and_clocks(where))
        yield Bench(Setup(model, where, dtype, workloads, log, build), report, json)
    finish(report, json)


def integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part.strip()]


def checkout() -> str | None:
    """The commit of this checkout."""
    git = ("git", "-C", str(Path(__file__).parent))
    head = _output(*git, "rev-parse", "HEAD")
    return f"{head} and changes" if head and _output(*git, "status", "--porcelain", "-uno") else head


def _output(*command: str) -> str | None:
    with suppress(OSError):
        done = subprocess.run(command, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else None
    return None


def driver_and_clocks(device: torch.device) -> dict[str, Any]:
    """nvidia-smi's answer while the device is busy: idle clocks say nothing."""
    command = shutil.which("nvidia-smi") or shutil.which("nvidia-smi", path="/usr/local/nvidia/bin")
    if command is None:
        return {"driver": None, "clocks": None}
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"  # whatever CUDA_VISIBLE_DEVICES says
    query = [command, f"--query-gpu=driver_version,{','.join(CLOCKS)}", "--format=csv,noheader", f"--id={uuid}"]
    busy, until = torch.ones(2**26, device=device), time.monotonic() + 20
    with subprocess.Popen(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as asking:
        while asking.poll() is None and time.monotonic() < until:
            for _ in range(20):
                busy.sum()
            torch.cuda.synchronize(device)
        asking.kill()
        driver, *clocks = asking.communicate()[0].strip().partition("\n")[0].split(", ")
    return {"driver": driver or None, "clocks": dict(zip(CLOCKS, clocks, strict=False)) or None}
