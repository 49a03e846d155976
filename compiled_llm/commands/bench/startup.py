"""``bench startup``: from the start of a process to its first token, with cold and with warm caches."""

from __future__ import annotations

import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from compiled_llm.commands.bench.contender import Contender, Setup
from compiled_llm.commands.bench.experiment import Save, run_each
from compiled_llm.commands.bench.peer import started
from compiled_llm.commands.bench.report import Report
from compiled_llm.commands.bench.results import Startup
from compiled_llm.commands.bench.timing import Now

STAGES = ("imported", "loaded", "first token", "all tokens")
CACHES = {
    "PYTHONPYCACHEPREFIX": "python",
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
        warm_runs: starts with the caches of the last cold one.
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
    with tempfile.TemporaryDirectory(prefix="compiled_llm_bench_") as root, contender.worker(setup) as command:
        for cache, runs in (("cold", cold_runs), ("warm", warm_runs)):
            stages: dict[str, list[float]] = defaultdict(list)
            for number in range(runs):
                setup.log(f"{contender.name}, {cache} caches: start {number + 1} of {runs}")
                folder = Path(root) / str(number if cache == "cold" else cold_runs - 1)
                for name, seconds in _start(command, setup, folder, report).items():
                    stages[name].append(seconds)
            if runs:
                yield Startup(contender.name, cache, dict(stages))


def _start(
    command: list[str], setup: Setup, caches: Path, report: Report, now: Now = time.perf_counter
) -> dict[str, float]:
    """Return when each stage was reached, in seconds after the process was started."""
    folders = {variable: caches / name for variable, name in CACHES.items()}
    for folder in folders.values():
        folder.mkdir(parents=True, exist_ok=True)
    environ = {**os.environ, **{variable: str(folder) for variable, folder in folders.items()}}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    stages: dict[str, float] = {}
    begin = now()
    with started(command, lambda name: stages.setdefault(name, now() - begin), environ) as peer:
        peer.wait_for("loaded")
        peer.ask(setup.workloads[0], 0)
        stages["all tokens"] = now() - begin
    report.machine["versions"].update(peer.versions)
    return {name: stages[name] for name in STAGES}
