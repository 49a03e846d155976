"""The table of all that `compiled-llm doctor` looks at: packages, devices, compilers, and the folders of caches."""

# No check may depend on another's health: torch and the rest are imported inside each, and one that fails says so
# itself.

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import compiled_llm
from compiled_llm.env import Env
from compiled_llm.execution.threads.busy_cores import other_work

if TYPE_CHECKING:
    from packaging.requirements import Requirement

Status = Literal["ok", "warning", "missing", "optional", "failed", "not needed"]

_GIB = 2**30
_LITTLE_MEMORY = 2 * _GIB
_OLDEST_CAPABILITY, _BFLOAT16_CAPABILITY = (7, 5), (8, 0)


class Outcome(NamedTuple):
    """The result of one check: version, path, size or what is wrong, and how to get it or what to do."""

    status: Status
    detail: str
    fix: str = ""


class DoctorFinding(NamedTuple):
    """One thing that was looked at; ``part`` is its heading, and if it is ``needed``, nothing runs here without it."""

    part: str
    name: str
    status: Status
    detail: str
    fix: str = ""
    needed: bool = False

    @property
    def prevents(self) -> bool:
        return self.needed and self.status in ("missing", "failed")


class Check(NamedTuple):
    """One thing to look at: its heading and name, what looks at it, and whether nothing runs here without it."""

    part: str
    name: str
    look: Callable[[], Outcome]
    needed: bool = False

    def finding(self) -> DoctorFinding:
        try:
            outcome = self.look()
        except Exception as error:
            outcome = Outcome("warning", f"cannot be checked: {essence(error)}")
        return DoctorFinding(self.part, self.name, *outcome, needed=self.needed and outcome.status != "not needed")


USES = {
    "": "nothing runs without it",
    "cuda": "attention kernels on CUDA",
    "demo": "the command line, and GGUF files",
    "server": "`serve`, its API, and its clients",
    "structured": "grammars that answers follow",
    "ray": "replicas of a server",
    "debug": "code that Dynamo wrote, as Python",
    "bench": "`bench`, which asks servers and draws",
}
"""The extras of this package, each with what its packages are for."""


_INSTALL = "pip install ."


class Package(NamedTuple):
    """A package: the module to import, what pip is asked for, the extra that brings it if one does, and its use."""

    module: str
    requirement: Requirement
    extra: str
    use: str


def own_requirements() -> list[str] | None:
    """Return what compiled-llm's own metadata names; None if it was not installed, but put on Python's path."""
    try:
        return metadata.requires("compiled-llm") or []
    except metadata.PackageNotFoundError:
        return None


def packages() -> list[Package]:
    """Return those that compiled-llm's own metadata names, and Triton, which torch brings."""
    from packaging.requirements import Requirement

    found = {"triton": Package("triton", Requirement("triton"), "", "Inductor's kernels on CUDA")}
    requirements = [Requirement(line) for line in own_requirements() or []]
    for extra, use in USES.items():
        for each in requirements:
            if each.marker is None or each.marker.evaluate({"extra": extra}):
                module = ".".join([each.name.removesuffix("-python").replace("-", "_"), *each.extras])
                found.setdefault(each.name, Package(module, each, extra, use))
    return [package for package in found.values() if package.requirement.name not in ("compiled-llm", "ninja")]


def checks(cuda: bool) -> Iterator[Check]:
    """Yield a check for each thing that compiled_llm uses, on CUDA or on the CPU."""
    yield Check("packages", "Python", python, True)
    yield Check("packages", "compiled_llm", ourselves, True)
    for package in packages():
        if package.extra == "cuda" or package.module == "triton":
            yield Check("packages", package.module, partial(for_cuda, package, cuda), cuda)
        elif package.extra:
            yield Check("extras", package.module, partial(imported, package, "optional"))
        else:
            yield Check("packages", package.module, partial(imported, package), True)
    yield Check("devices", "NVIDIA driver", nvidia_driver)
    yield from _gpus() if cuda else [Check("devices", "CUDA", no_gpu)]
    yield Check("devices", "CPU", partial(cpu, cuda))
    yield Check("compilers", "C++ compiler", cxx, True)
    yield Check("compilers", "Python headers", python_headers, True)
    yield Check("compilers", "nvcc", partial(cuda_tool, "nvcc", cuda), cuda)
    yield Check("compilers", "ninja", partial(cuda_tool, "ninja", cuda), cuda)
    yield Check("caches", "compiled_llm", lambda: cache(Env.from_environ().cache, "COMPILED_LLM_CACHE"))
    yield Check("caches", "Inductor", inductor_cache)
    yield Check("caches", "FlashInfer", flashinfer_cache)


def _gpus() -> Iterator[Check]:
    import torch

    for index in range(torch.cuda.device_count()):  # `cuda` stands for the first
        yield Check("devices", f"cuda:{index}", partial(gpu, index), index == 0)


def essence(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    cause = next((line for line in lines[1:] if re.search(r"\b(error|fatal)\b", line, re.IGNORECASE)), None)
    text = lines[0] if cause is None else f"{lines[0].rstrip(':')}: {cause}"
    return text if len(text) <= 300 else text[:297] + "..."


# ---- packages


def python() -> Outcome:
    here = f"{platform.python_version()}, {sys.platform} {platform.machine()}, {sys.executable}"
    return Outcome("ok", here) if sys.platform == "linux" else Outcome("warning", f"{here}: only Linux is tested")


def ourselves() -> Outcome:
    """Import all of compiled_llm, and with it what it uses of torch and transformers."""
    here = f"{compiled_llm.__version__}, {Path(compiled_llm.__file__).parent}"
    try:
        importlib.import_module("compiled_llm.huggingface.wrap")
    except Exception as error:
        return Outcome("failed", f"{here}, does not import: {essence(error)}")
    if own_requirements() is None:
        return Outcome("warning", f"{here}: not installed, so the versions that it needs are not compared", _INSTALL)
    return Outcome("ok", here)


def for_cuda(package: Package, cuda: bool) -> Outcome:
    missing = missing_for_cuda("FlashInfer") if cuda and package.module == "flashinfer" else None
    return missing or imported(package, "missing" if cuda else "not needed")


def missing_for_cuda(what: str) -> Outcome | None:
    """Return that FlashInfer misses this on CUDA, and the way out; a warning if Triton's kernels can run."""
    from compiled_llm_ops.backends import backend_named

    status: Status = "missing" if backend_named("triton").installation.problems() else "warning"
    for message in backend_named("flashinfer").installation.problems():
        if message.startswith(f"{what} "):
            detail, _, fix = " ".join(message.split()).rpartition(": ")
            return Outcome(status, detail, fix)
    return None


def imported(package: Package, if_missing: Status = "missing") -> Outcome:
    """Import a package, and compare its version with those that compiled-llm supports."""
    name = package.requirement.name
    supported = package.requirement.specifier
    pip = f"pip install '.[{package.extra}]'" if package.extra else f"pip install '{name}{supported}'"
    try:
        module = importlib.import_module(package.module)
    except Exception as error:
        lacking = error.name if isinstance(error, ModuleNotFoundError) else None
        if lacking in (package.module, package.module.partition(".")[0]):
            return Outcome(if_missing, f"not installed: {package.use}", "" if if_missing == "not needed" else pip)
        fix = pip if lacking else f"pip install --force-reinstall --no-deps '{name}{supported}'"
        return Outcome("failed", f"does not import: {essence(error)}", fix)
    detail = version = str(getattr(module, "__version__", None) or metadata.version(name))
    if package.module == "torch":
        detail += f", built for {f'CUDA {module.version.cuda}' if module.version.cuda else 'the CPU'}"
    if supported.contains(version, prereleases=True):
        return Outcome("ok", detail)
    return Outcome("warning", f"{detail} is outside {supported}, the versions that are supported", pip)


# ---- devices


def nvidia_driver() -> Outcome:
    version = _driver_version()
    return Outcome("not needed", "none") if version is None else Outcome("ok", version)


def _driver_version() -> str | None:
    query = ("--query-gpu=driver_version", "--format=csv,noheader")
    if shutil.which("nvidia-smi") and (lines := _output("nvidia-smi", *query).splitlines()):
        return lines[0]
    module = Path("/proc/driver/nvidia/version")
    return module.read_text().partition("\n")[0] if module.exists() else None


def gpu(index: int) -> Outcome:
    import torch

    from compiled_llm.kinds.registry import CODECS

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
    detail += "".join(f", no kv_dtype={name!r}" for name, codec in CODECS.items() if capability < codec.capability)
    if free < _LITTLE_MEMORY:
        return Outcome("warning", detail, "see in nvidia-smi what else runs there")
    return Outcome("ok", detail)


def no_gpu() -> Outcome:
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

    free = free_bytes(torch.device("cpu"))
    cores = os.cpu_count() or 1
    detail = f"{cores} cores, {torch.get_num_threads()} threads, {free / _GIB:.1f} GiB of memory free"
    if not cuda and (busy := other_work()) is not None:
        detail += f", but {busy}"
        fix = "end other work before you measure; beside it, OMP_NUM_THREADS=1 is often faster"
        return Outcome("warning", detail, fix)
    return Outcome("ok" if free >= _LITTLE_MEMORY else "warning", detail)


# ---- compilers


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


# ---- caches


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
