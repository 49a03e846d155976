"""How many threads of OpenMP compute on a CPU, and how they wait for each other; set before torch is imported."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

from compiled_llm.execution.threads.busy_cores import SPINS, WAITING


def set_up_threads(environment: MutableMapping[str, str] = os.environ, root: Path = Path("/")) -> None:
    """Let waiting threads sleep soon, and start no more than there are cores; what the user has set stays."""
    if not any(name in environment for name in WAITING):
        environment["GOMP_SPINCOUNT"] = SPINS
    share = cores_of_control_group(root)
    if share is not None and share < len(os.sched_getaffinity(0)):  # torch starts a thread for each of those
        environment.setdefault("OMP_NUM_THREADS", str(max(1, int(share))))


def cores_of_control_group(root: Path = Path("/")) -> float | None:
    """Return how many cores the control group of this process may use, as ``docker run --cpus`` says; None for all."""
    shares = []
    try:
        groups = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
        for _, controllers, path in groups:
            if controllers == "":
                shares += _quotas(root / "sys/fs/cgroup", path, "cpu.max")
            elif "cpu" in controllers.split(","):
                shares += _quotas(root / "sys/fs/cgroup/cpu", path, "cpu.cfs_quota_us", "cpu.cfs_period_us")
    except (OSError, ValueError):  # no control groups, or of another kind
        return None
    return min(shares, default=None)


def _quotas(mounted: Path, group: str, *files: str) -> list[float]:
    found = []
    folder = mounted / group.strip("/")
    for each in (folder, *folder.parents):
        if mounted not in (each, *each.parents):
            break
        if all((each / file).exists() for file in files):
            quota, period = " ".join((each / file).read_text() for file in files).split()
            if quota not in ("max", "-1"):
                found.append(int(quota) / int(period))
    return found
