"""Where and with what a result was measured; ``tools/bench`` adds commit, driver and clocks."""

from __future__ import annotations

import os
import platform
import sys
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

PACKAGES = ("compiled-llm", "torch", "transformers", "flashinfer-python", "triton", "numpy")


def describe() -> dict[str, Any]:
    """Return versions, processor and load of this machine, and its GPU if torch is imported and sees one."""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "commit": None,
        "python": platform.python_version(),
        "versions": _versions(),
        "cpu": {"name": _cpu_name(), "cores": os.cpu_count()},
        "load": round(os.getloadavg()[0], 2),  # figures from a machine that is not quiet are worth little
        "gpu": _gpu(sys.modules.get("torch")),
    }


def _gpu(torch: Any) -> dict[str, Any] | None:
    if torch is None or not torch.cuda.is_available():
        return None
    return {"name": torch.cuda.get_device_name(), "cuda": torch.version.cuda}


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _cpu_name() -> str:
    with suppress(OSError), open("/proc/cpuinfo") as lines:
        names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        return next(names, platform.machine())
    return platform.processor() or platform.machine()
