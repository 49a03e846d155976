"""The machine: its devices, the compilers that build kernels, and the folders that keep what was built."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from contextlib import suppress
from pathlib import Path

from compiled_llm.commands.doctor.finding import Outcome, essence
from compiled_llm.commands.doctor.packages import missing_for_cuda

_GIB = 2**30
_LITTLE_MEMORY = 2 * _GIB
_OLDEST_CAPABILITY, _BFLOAT16_CAPABILITY = (7, 5), (8, 0)


def nvidia_driver() -> Outcome:
    version = _driver_version()
    return Outcome("not needed", "none") if version is None else Outcome("ok", version)


def gpu(index: int) -> Outcome:
    import torch

    try:
        capability = torch.cuda.get_device_capability(index)
        free, total = torch.cuda.mem_get_info(index)
        detail = f"{torch.cuda.get_device_name(index)}, compute capability {capability[0]}.{capability[1]}, "
    except Exception as error:
        return Outcome("failed", essence(error), "see what nvidia-smi says")
    detail += f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB free"
    if capability < _OLDEST_CAPABILITY:
        detail += f": FlashInfer needs {_OLDEST_CAPABILITY[0]}.{_OLDEST_CAPABILITY[1]}"
        return Outcome("failed", detail, "run on the CPU: --device cpu")
    if capability < _BFLOAT16_CAPABILITY:
        return Outcome("warning", f"{detail}, no bfloat16", "load models with dtype=float16")
    if free < _LITTLE_MEMORY:
        return Outcome("warning", detail, "see in nvidia-smi what else runs there")
    return Outcome("ok", detail)


def no_gpu() -> Outcome:
    """Return why torch sees no GPU, if there seems to be one."""
    import torch

    driver = _driver_version()
    if driver is None:
        return Outcome("not needed", "no device: models run on the CPU")
    detail = f"there is an NVIDIA driver ({driver}), but torch sees no device, so models run on the CPU"
    if torch.version.cuda is None:
        fix = "pip install --force-reinstall torch (from PyPI, whose build is for CUDA)"
        return Outcome("warning", f"{detail}: this torch is not built for CUDA", fix)
    why = f"CUDA_VISIBLE_DEVICES is {os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}"
    try:
        torch.cuda.init()
    except Exception as error:
        why = essence(error)
    return Outcome("warning", f"{detail}: {why}", "see what nvidia-smi says")


def cpu(cuda: bool) -> Outcome:
    """Return cores and free memory, and whether other work leaves models room there, if that is where they run."""
    import torch

    from compiled_llm.kvcache.memory import free_bytes

    free, cores, load = free_bytes(torch.device("cpu")), os.cpu_count() or 1, os.getloadavg()[0]
    detail = f"{cores} cores, {torch.get_num_threads()} threads, {free / _GIB:.1f} GiB of memory free"
    if load > cores and not cuda:
        detail += f", but {load:.1f} jobs share the cores, and threads wait for each other"
        fix = "end other work before you measure; beside it, OMP_NUM_THREADS=1 is often faster"
        return Outcome("warning", detail, fix)
    return Outcome("ok" if free >= _LITTLE_MEMORY else "warning", detail)


def _driver_version() -> str | None:
    query = ("--query-gpu=driver_version", "--format=csv,noheader")
    if shutil.which("nvidia-smi") and (lines := _output("nvidia-smi", *query).splitlines()):
        return lines[0]
    module = Path("/proc/driver/nvidia/version")
    if not module.exists():
        return None
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", module.read_text())
    return "of unknown version" if found is None else found[0]


def cxx() -> Outcome:
    from compiled_llm.compat.torch.inductor import cpp_compiler
    from compiled_llm.model.checks import missing_compiler

    if (missing := missing_compiler()) is not None:
        detail, _, fix = missing.partition("; ")
        return Outcome("missing", detail, fix)
    return _program(shutil.which(cpp_compiler()) or cpp_compiler())


def python_headers() -> Outcome:
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if header.exists():
        return Outcome("ok", str(header.parent))
    fix = f"install this Python's development package, for example with 'apt install python3.{sys.version_info[1]}-dev'"
    return Outcome("missing", f"{header} is not there", fix)


def find_nvcc() -> str | None:
    """Return the nvcc that FlashInfer builds its kernels with, if it has to build them."""
    from compiled_llm_ops.backends import backend_named

    return backend_named("flashinfer").installation.compiler()


def cuda_tool(name: str, cuda: bool) -> Outcome:
    if cuda and (missing := missing_for_cuda(name)):
        return missing
    path, version = (find_nvcc(), "release.*") if name == "nvcc" else (shutil.which(name), ".+")
    if path is None:
        why = "FlashInfer's kernels are installed already built" if cuda else "not found: only CUDA needs it"
        return Outcome("not needed", why)
    return _program(path, version)


def _program(path: str, version: str = ".+") -> Outcome:
    found = re.search(version, _output(path, "--version"))
    return Outcome("ok", f"{'of unknown version' if found is None else found[0].strip()}, {path}")


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise RuntimeError(f"{command[0]} fails: {(done.stderr or done.stdout).strip()}")
    return done.stdout.strip()


def inductor_cache() -> Outcome:
    from compiled_llm.compat.torch.inductor import inductor_cache

    return cache(inductor_cache(), "TORCHINDUCTOR_CACHE_DIR")


def flashinfer_cache() -> Outcome:
    if importlib.util.find_spec("flashinfer") is None:
        return Outcome("not needed", "flashinfer is not installed")
    folder = importlib.import_module("flashinfer.jit.env").FLASHINFER_CACHE_DIR
    return cache(folder, "FLASHINFER_WORKSPACE_BASE")


def cache(folder: Path, variable: str) -> Outcome:
    """Look at a folder that an environment variable can name: its size, and whether it can be written."""
    from compiled_llm.model.checks import belongs_to_another

    parent = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        tempfile.TemporaryFile(dir=parent).close()  # access rights alone do not tell, least of all root
    except OSError as error:
        fix = f"make it writable, or set {variable} to another folder"
        return Outcome("warning", f"{folder}, not writable: {error.strerror}", fix)
    if belongs_to_another(folder):
        fix = f"set {variable} to a folder of your own, unless you trust everybody who can write there"
        return Outcome("warning", f"{folder} belongs to another user", fix)
    return Outcome("ok", f"{folder}, {_size(folder)}")


def _size(folder: Path) -> str:
    size = 0
    for path, _, files in os.walk(folder):
        for file in files:
            with suppress(OSError):  # another process has removed it
                size += os.lstat(os.path.join(path, file)).st_size
    return f"{size / 2**20:,.1f} MiB" if folder.exists() else "empty"
