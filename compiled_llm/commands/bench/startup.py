"""``bench startup``: from the start of a process to its first token, with cold and warm caches, and with artifacts."""

from __future__ import annotations

import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from compiled_llm.commands.bench.contender import Contender, Setup
from compiled_llm.commands.bench.contenders.ours import Ours
from compiled_llm.commands.bench.experiment import Save, run_each
from compiled_llm.commands.bench.local import artifacts_worker
from compiled_llm.commands.bench.peer import started
from compiled_llm.commands.bench.report import Report
from compiled_llm.commands.bench.results import Startup
from compiled_llm.commands.bench.timing import Now

STAGES = ("imported", "loaded", "first token", "all tokens")
PYTHON = "PYTHONPYCACHEPREFIX"
CACHES = {
    PYTHON: "python",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "TORCH_EXTENSIONS_DIR": "torch_extensions",
    "CUDA_CACHE_PATH": "cuda",
    "VLLM_CACHE_ROOT": "vllm",
}
"""The folders of compiled code; every cold run has its own. Model files stay where they are.

Byte code is among them: if packages were installed without it, each start would compile all of it again.
"""


def measure(
    contenders: Iterable[Contender],
    setup: Setup,
    cold_runs: int,
    warm_runs: int,
    report: Report,
    save: Save,
) -> None:
    """Start one contender after the other, into the report.

    Args:
        contenders: who takes part.
        setup: model, device, and one workload.
        cold_runs: starts with empty caches, at least one.
        warm_runs: starts with the caches of the last cold one; as many of ours with artifacts and empty caches.
        report: gets results, obstacles and failures.
        save: called after each result.
    """

    def measure_one(contender: Contender) -> None:
        for result in _measure_one(contender, setup, cold_runs, warm_runs, report):
            report.startup.append(result)
            save()

    run_each(contenders, setup, report, save, measure_one)


def _measure_one(
    contender: Contender, setup: Setup, cold_runs: int, warm_runs: int, report: Report
) -> Iterable[Startup]:
    with tempfile.TemporaryDirectory(prefix="compiled_llm_bench_") as root:
        starts = Starts(contender, setup, Path(root), report)
        caches = [starts.empty(f"cold_{number}") for number in range(cold_runs)]
        with contender.worker(setup) as command:
            yield starts.timed("cold", command, caches)
            if warm_runs:
                yield starts.timed("warm", command, caches[-1:] * warm_runs)
        if warm_runs and isinstance(contender, Ours) and contender.mode != "eager":
            artifacts = starts.with_artifacts()
            # Byte code is left by the first process that imports a package, whatever it starts with.
            python = {PYTHON: caches[-1][PYTHON]}
            caches = [{**starts.empty(f"artifacts_{number}"), **python} for number in range(warm_runs)]
            with contender.worker(artifacts) as command:
                yield starts.timed("artifacts", command, caches)


class Starts:
    """Starts one contender again and again."""

    def __init__(self, contender: Contender, setup: Setup, root: Path, report: Report) -> None:
        """Start nothing yet; folders go below ``root``, versions into the report."""
        self._contender = contender
        self._setup = setup
        self._root = root
        self._report = report

    def empty(self, name: str) -> dict[str, Path]:
        """Return new folders for everything compiled, by the variables that name them; compilers want no spaces."""
        folders = {variable: self._root / name / folder for variable, folder in CACHES.items()}
        for folder in folders.values():
            folder.mkdir(parents=True)
        return folders

    def with_artifacts(self) -> Setup:
        """Return the setup with artifacts, which a process of its own has written with empty caches."""
        setup = replace(self._setup, artifacts=str(self._root / "artifacts"))
        self._setup.log(f"{self._contender.name}: compiling artifacts")
        command = artifacts_worker(setup, self._contender.name)
        with started(command, lambda mark: None, _environ(self.empty("for_artifacts"))) as peer:
            peer.wait_for("written")
        return setup

    def timed(self, kind: str, command: list[str], caches: Sequence[Mapping[str, Path]]) -> Startup:
        """Start once with each set of caches, one after the other."""
        stages: dict[str, list[float]] = defaultdict(list)
        for number, folders in enumerate(caches, 1):
            self._setup.log(f"{self._contender.name}, {kind}: start {number} of {len(caches)}")
            for name, seconds in self._start(command, folders).items():
                stages[name].append(seconds)
        return Startup(self._contender.name, kind, dict(stages))

    def _start(self, command: list[str], folders: Mapping[str, Path], now: Now = time.perf_counter) -> dict[str, float]:
        """Return when each stage was reached, in seconds after the process was started."""
        stages: dict[str, float] = {}
        begin = now()
        with started(command, lambda name: stages.setdefault(name, now() - begin), _environ(folders)) as peer:
            peer.wait_for("loaded")
            peer.ask(self._setup.workloads[0], 0)
            stages["all tokens"] = now() - begin
        self._report.machine["versions"].update(peer.versions)
        return {name: stages[name] for name in STAGES}


def _environ(folders: Mapping[str, Path]) -> dict[str, str]:
    environ = {**os.environ, **{variable: str(folder) for variable, folder in folders.items()}}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    return environ
