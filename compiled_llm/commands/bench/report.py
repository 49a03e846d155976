"""The JSON that a run of the bench writes: where and how it was measured, and lists of results."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeAlias

from compiled_llm.explaining.cpu import cpu_name

_PACKAGES = ("compiled-llm", "torch", "transformers", "flashinfer-python", "triton", "numpy")

Result = dict[str, Any]
"""One contender under one workload: what was asked, every time that was measured, and ``figures`` made of these."""
Save: TypeAlias = Callable[[], object]
Log: TypeAlias = Callable[[str], object]


@dataclass
class BenchReport:
    """One run of the bench; ``machine`` is what ``describe_machine`` returns."""

    command: str
    machine: dict[str, Any]
    model: dict[str, Any]
    memory: dict[str, dict[str, float]] = field(default_factory=dict)  # bytes on the device by contender
    # why contenders could not take part; ``failures``: why others did not get to their end
    unavailable: dict[str, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    # by their kind, such as ``latency``
    results: dict[str, list[Result]] = field(default_factory=dict)

    def add(self, kind: str, result: Result) -> None:
        self.results.setdefault(kind, []).append(result)

    def save(self, path: Path | None) -> None:
        if path is not None:
            found = asdict(self)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"schema": 1, **found, **found.pop("results")}, indent=1) + "\n")


def failure(doing: str, error: BaseException) -> str:
    return f"{doing}: {type(error).__name__}: {' '.join(str(error).split())[:1000]}"


def describe_machine() -> dict[str, Any]:
    """Return versions, processor and load of this machine, and its GPU if torch is imported and sees one."""
    torch = sys.modules.get("torch")
    gpu = None
    if torch is not None and torch.cuda.is_available():
        gpu = {"name": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "commit": None,
        "python": platform.python_version(),
        "versions": _versions(),
        "cpu": {"name": cpu_name(), "cores": os.cpu_count()},
        "load": round(os.getloadavg()[0], 2),  # figures from a machine that is not quiet are worth little
        "gpu": gpu,
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
