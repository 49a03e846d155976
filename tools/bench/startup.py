"""The time from the start of a process to its first token: with cold caches, with warm ones, and with artifacts.

python tools/bench/startup.py --model qwen3-0.6b --runs 3 --contenders compiled-llm:cuda-graphs,vllm
"""

from __future__ import annotations

import json as js
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from common import Bench, Commit, Contenders, DeviceName, Json, Model, Vllm, bench
from models import write_model
from peers import HERE, HFStatic, Peer
from processes import started

from compiled_llm.commands.bench.contenders import ALL, Contender, Ours, choose
from compiled_llm.commands.bench.timing import Spread, Workload
from compiled_llm.server.own_process import own_command

STAGES = ("torch", "imported", "device", "weights", "loaded", "first token", "all tokens")
"""What a process has done; peers tell fewer of them."""
PYTHON = "PYTHONPYCACHEPREFIX"
CACHES = {
    PYTHON: "python",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "TORCH_EXTENSIONS_DIR": "torch_extensions",
    "CUDA_CACHE_PATH": "cuda",
    "VLLM_CACHE_ROOT": "vllm",
    "COMPILED_LLM_CACHE": "compiled_llm",
}
"""The folders of compiled code; every cold run has its own. Model files stay where they are.

Byte code is among them: if packages were installed without it, each start would compile all of it again.
"""
Caches = Mapping[str, Path]


class Start(NamedTuple):
    """One start."""

    stages: dict[str, float]  # when each was reached, in seconds after the process was started
    spent: dict[str, float]  # seconds by what they were spent on, and until which stage


class Starts:
    """Starts one contender again and again."""

    def __init__(self, run: Bench, contender: Contender, root: Path, spent: bool) -> None:
        """`spent`: whether processes of ours also tell what they spend their time on."""
        self.run, self.contender, self.root, self.spent = run, contender, root, spent
        (self.workload,) = run.setup.workloads
        # Ours load a folder, as users do: what is kept of a model in a folder is not taken for one made in memory.
        setup, ours = run.setup, isinstance(contender, Ours)
        self.model = write_model(setup.name, setup.dtype, setup.device, root / "model") if ours else setup.name
        setup.free_memory()  # for the processes that are timed

    def empty(self, name: str) -> dict[str, Path]:
        """New folders for everything compiled, by the variables that name them; compilers want no spaces."""
        folders = {variable: self.root / name / folder for variable, folder in CACHES.items()}
        for folder in folders.values():
            folder.mkdir(parents=True)
        return folders

    def timed(self, kind: str, caches: Sequence[Caches], artifacts: str | None = None) -> None:
        """Start once with each set of caches, one after the other."""
        stages: dict[str, list[float]] = defaultdict(list)
        spent: dict[str, list[float]] = defaultdict(list)
        with self.command(artifacts) as command:
            for number, folders in enumerate(caches, 1):
                self.run.setup.log(f"{self.contender.name}, {kind}: start {number} of {len(caches)}")
                start = self.start(command, folders)
                for found, times in ((stages, start.stages), (spent, start.spent)):
                    for name, seconds in times.items():
                        found[name].append(seconds)
        figures = {name: Spread.of_times(times)._asdict() for name, times in stages.items()}
        result = {"contender": self.contender.name, "cache": kind, "stages": dict(stages), "figures": figures}
        more = {"spent": {what: Spread.of_times(times)._asdict() for what, times in spent.items()}} if spent else {}
        self.run.add("startup", result | more)

    def start(self, command: list[str], folders: Caches) -> Start:
        """Start a process, which answers with one token, then with more."""
        stages: dict[str, float] = {}
        spent: dict[str, float] = {}
        begin = time.perf_counter()

        def reach(stage: str) -> None:
            stages.setdefault(stage, time.perf_counter() - begin)

        with started(command, reach, environ(folders)) as worker:
            worker.wait_for("loaded")
            for stage, new, number in (("first token", 1, 0), ("all tokens", self.workload.new, 1)):
                rows = self.workload.prompts(500, number)  # tokens that all models have
                answer = worker.ask(rows, [new] * self.workload.batch, sampling={"temperature": 0.0})
                reach(stage)
                spent |= {f"{what}, until {stage}": seconds for what, seconds in answer.get("spent", {}).items()}
        self.run.report.machine["versions"].update(worker.versions)
        return Start({name: stages[name] for name in STAGES if name in stages}, spent)

    @contextmanager
    def command(self, artifacts: str | None) -> Iterator[list[str]]:
        setup = self.run.setup
        if isinstance(self.contender, Peer):
            with self.contender.command(setup) as command:
                yield command
            return
        work = self.workload
        job = {
            "contender": self.contender.name,
            "model": self.model,
            "device": str(setup.device),
            "dtype": str(setup.dtype).removeprefix("torch."),
            "workload": [work.batch, work.prompt, work.new],
            "artifacts": artifacts,
            "spent": self.spent,
        }
        yield [sys.executable, os.fspath(HERE / "startup_worker.py"), js.dumps(job)]

    def write_artifacts(self, mode: str) -> str:
        """Have a process of its own write them, with empty caches."""
        setup, folder, rows = self.run.setup, self.root / "artifacts", str(self.workload.batch)
        setup.log(f"{self.contender.name}: compiling artifacts")
        command = own_command("compile", self.model, "-o", str(folder), "--mode", mode, "--device", setup.device.type)
        command += ["--max-num-seqs", rows, "--warmup", rows, "--quiet"]
        subprocess.run(
            command, env=environ(self.empty("for_artifacts")), check=True, stdout=2
        )  # tables alone go to stdout
        return str(folder)


def environ(folders: Caches) -> dict[str, str]:
    found = {**os.environ, **{variable: str(folder) for variable, folder in folders.items()}}
    found.pop("PYTHONDONTWRITEBYTECODE", None)
    return found


def main(
    model: Model = "qwen3-0.6b",
    batch: Annotated[int, typer.Option(min=1, help="Rows.")] = 1,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens in each prompt.")] = 128,
    new: Annotated[int, typer.Option(min=2, help="New tokens; once they have come, everything is compiled.")] = 16,
    contenders: Contenders = "compiled-llm:cuda-graphs,vllm",
    cold_runs: Annotated[int, typer.Option(min=1, help="Starts with empty caches.")] = 1,
    runs: Annotated[int, typer.Option(min=0, help="Starts with warm caches, and as many with artifacts.")] = 5,
    spent: Annotated[bool, typer.Option(help="Also tell what our processes spend their time on.")] = False,
    device: DeviceName = "auto",
    vllm: Vllm = "",
    json: Json = None,
    commit: Commit = None,
) -> None:
    """Measure the time from a process's start to its first token: with cold caches, warm ones, and artifacts."""
    known = [*ALL, HFStatic(), Peer(vllm)]
    with bench(model, device, [Workload(batch, prompt, new)], json, commit) as run:

        def measure(contender: Contender) -> None:
            with tempfile.TemporaryDirectory(prefix="compiled_llm_bench_") as root:
                starts = Starts(run, contender, Path(root), spent)
                caches = [starts.empty(f"cold_{number}") for number in range(cold_runs)]
                starts.timed("cold", caches)
                if runs:
                    starts.timed("warm", caches[-1:] * runs)
                if runs and isinstance(contender, Ours) and contender.mode != "eager":
                    artifacts = starts.write_artifacts(contender.mode)
                    # Byte code is left by the first process that imports a package, whatever it starts with.
                    python = {PYTHON: caches[-1][PYTHON]}
                    fresh = [{**starts.empty(f"artifacts_{number}"), **python} for number in range(runs)]
                    starts.timed("artifacts", fresh, artifacts)

        run.each(choose(contenders, run.setup.device.type, known), measure)


if __name__ == "__main__":
    typer.run(main)
