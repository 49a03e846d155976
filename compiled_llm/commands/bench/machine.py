"""Where and with what a result was measured."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import compiled_llm
from compiled_llm.explaining.subject import cpu_name

PACKAGES = ("transformers", "flashinfer-python", "triton", "numpy")
CLOCKS = ("clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit", "temperature.gpu")


def describe(device: torch.device, commit: str | None = None) -> dict[str, Any]:
    """Return versions, processor, GPU and its clocks under load, and the commit.

    Args:
        device: where models run.
        commit: of the package; None for what git says: a copy may stand in another checkout.
    """
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "commit": commit or _commit(),
        "python": platform.python_version(),
        "versions": {"compiled-llm": compiled_llm.__version__, "torch": str(torch.__version__), **_versions()},
        "cpu": {"name": cpu_name(), "cores": os.cpu_count(), "threads": torch.get_num_threads()},
        "load": _load(),
        "gpu": _gpu(device) if device.type == "cuda" else None,
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _load() -> float | None:
    """How busy the machine was already: figures from one that is not quiet are worth little."""
    try:
        return round(os.getloadavg()[0], 2)
    except (AttributeError, OSError):
        return None


def _commit() -> str | None:
    """The checkout's commit, if this package is part of one: it may also just be installed inside another's."""
    folder = str(Path(compiled_llm.__file__).parent)
    git = ("git", "-C", folder, "-c", "core.fsmonitor=false")  # or a checkout's settings could name a program to run
    if _output(*git, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    head = _output(*git, "rev-parse", "HEAD")
    changes = _output(*git, "status", "--porcelain", "--untracked-files=no")
    return f"{head} and changes" if head and changes else head


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _gpu(device: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "memory": properties.total_memory,
        "capability": list(torch.cuda.get_device_capability(device)),
        "cuda": torch.version.cuda,
        "driver": _driver(),
        "clocks": _clocks_under_load(device),
    }


def _driver() -> str | None:
    with suppress(OSError):
        match = re.search(r"(\d+\.\d+(?:\.\d+)?)\s", Path("/proc/driver/nvidia/version").read_text())
        if match:
            return match[1]
    return None


def _clocks_under_load(device: torch.device) -> dict[str, str] | None:
    """Ask nvidia-smi while the device is busy: idle clocks say nothing."""
    command = shutil.which("nvidia-smi") or shutil.which("nvidia-smi", path="/usr/local/nvidia/bin")
    if command is None:
        return None
    query = [command, f"--query-gpu={','.join(CLOCKS)}", "--format=csv,noheader", f"--id={_uuid(device)}"]
    busy = torch.ones(2**26, device=device)
    with subprocess.Popen(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as asking:
        until = time.monotonic() + 20
        while asking.poll() is None and time.monotonic() < until:
            for _ in range(20):
                busy.sum()
            torch.cuda.synchronize(device)
        if asking.poll() is None:
            asking.kill()
        answer = asking.communicate()[0].strip().splitlines()[:1]
    return dict(zip(CLOCKS, answer[0].split(", "), strict=False)) if answer and asking.returncode == 0 else None


def _uuid(device: torch.device) -> str:
    """The device as nvidia-smi knows it, whatever CUDA_VISIBLE_DEVICES says."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
