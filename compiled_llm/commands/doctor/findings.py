"""What this machine has of all that compiled_llm uses, one finding each.

No finding may depend on another's health: torch and the rest are imported inside each check, and a check that fails
says so in its finding.
"""

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple

from compiled_llm import __version__
from compiled_llm.env import Env

Status = Literal["ok", "warning", "missing", "failed", "not needed"]

_GIB = 2**30
_LITTLE_MEMORY = 2 * _GIB
_OLDEST_CAPABILITY, _BFLOAT16_CAPABILITY = (7, 5), (8, 0)


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        part: the heading it belongs under.
        name: what was looked at.
        status: what came out.
        detail: version, path, size or what is wrong.
        fix: how to get it or what to do.
        needed: nothing can run here without it.
        seconds: how long it took, where that tells something.
    """

    part: str
    name: str
    status: Status
    detail: str
    fix: str = ""
    needed: bool = False
    seconds: float | None = None

    @property
    def prevents(self) -> bool:
        """Whether nothing can run here for this reason."""
        return self.needed and self.status in ("missing", "failed")


class Package(NamedTuple):
    """A package to look for.

    Attributes:
        module: what is imported.
        distribution: what pip calls it.
        extra: the extra of compiled-llm that brings it; none for what compiled-llm itself requires.
        use: what it is for.
    """

    module: str
    distribution: str
    extra: str
    use: str


REQUIRED = (
    Package("numpy", "numpy", "", "page tables"),
    Package("torch", "torch", "", "everything"),
    Package("transformers", "transformers", "", "the models"),
)
FLASHINFER = Package("flashinfer", "flashinfer-python", "cuda", "attention kernels on CUDA")
TRITON = Package("triton", "triton", "", "Inductor's kernels on CUDA")
OPTIONAL = (
    Package("accelerate", "accelerate", "demo", "loads GGUF files, and models with a device_map"),
    Package("gguf", "gguf", "demo", "loads GGUF files, the demo model's among them"),
    Package("typer", "typer", "demo", "the command line"),
    Package("depyf", "depyf", "debug", "shows the code that Dynamo and Inductor wrote"),
)


def examine(cuda: bool) -> Iterator[Finding]:
    """Yield a finding for each thing that compiled_llm uses.

    Args:
        cuda: models will run on a CUDA device, so what that takes is needed.
    """
    yield from _guarded("packages", "Python", _python)
    yield from _guarded("packages", "compiled_llm", _ourselves)
    for package in REQUIRED:
        yield from _guarded("packages", package.module, _package, "packages", package, True)
    yield from _guarded("packages", "flashinfer", _flashinfer, cuda)
    yield from _guarded("packages", "triton", _triton, cuda)
    yield from _guarded("devices", "NVIDIA driver", _driver)
    yield from _guarded("devices", "CUDA", _devices if cuda else _no_device)
    yield from _guarded("devices", "CPU", _cpu)
    yield from _guarded("compilers", "C++ compiler", _cxx)
    yield from _guarded("compilers", "Python headers", _headers)
    yield from _guarded("compilers", "nvcc", _nvcc, cuda)
    yield from _guarded("compilers", "ninja", _ninja, cuda)
    yield from _guarded("caches", "compiled_llm", _own_cache)
    yield from _guarded("caches", "Inductor", _inductor_cache)
    yield from _guarded("caches", "FlashInfer", _flashinfer_cache)
    for package in OPTIONAL:
        yield from _guarded("optional", package.module, _package, "optional", package, False)


def has_cuda() -> bool:
    """Whether torch works and sees a CUDA device."""
    try:
        import torch

        return torch.cuda.is_available()
    except Exception:  # the finding about torch tells
        return False


def essence(error: BaseException) -> str:
    """Return an error in one line: its first, and the first after it that speaks of an error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    cause = next((line for line in lines[1:] if re.search(r"\b(error|fatal)\b", line, re.IGNORECASE)), None)
    text = lines[0] if cause is None else f"{lines[0].rstrip(':')}: {cause}"
    return text if len(text) <= 300 else text[:297] + "..."


def _guarded(part: str, name: str, check: Callable[..., Finding | Sequence[Finding]], *args: Any) -> list[Finding]:
    try:
        found = check(*args)
    except Exception as error:
        return [Finding(part, name, "warning", f"cannot be checked: {essence(error)}")]
    return [found] if isinstance(found, Finding) else list(found)


# ---- packages


def _python() -> Finding:
    here = f"{platform.python_version()}, {sys.platform} {platform.machine()}, {sys.executable}"
    if sys.platform != "linux":
        return Finding("packages", "Python", "warning", f"{here}: only Linux is tested", needed=True)
    return Finding("packages", "Python", "ok", here, needed=True)


def _ourselves() -> Finding:
    """Import all of compiled_llm, and with it what it uses of torch and transformers."""
    here = f"{__version__}, {Path(__file__).parent}"
    try:
        importlib.import_module("compiled_llm.huggingface.wrap")
    except Exception as error:
        return Finding("packages", "compiled_llm", "failed", f"{here}, does not import: {essence(error)}", needed=True)
    return Finding("packages", "compiled_llm", "ok", here, needed=True)


def _package(part: str, package: Package, needed: bool) -> Finding:
    try:
        module = importlib.import_module(package.module)
    except Exception as error:
        return _not_imported(part, package, error, needed)
    version, wanted = _version(module, package), _wanted_versions(package)
    detail = version + (f", {_torch_build(module)}" if package.module == "torch" else "")
    if wanted is not None and not wanted.contains(version, prereleases=True):
        detail = f"{detail} is outside {wanted}, the versions that are supported"
        return Finding(part, package.module, "warning", detail, _pip(package), needed)
    return Finding(part, package.module, "ok", detail, needed=needed)


def _not_imported(part: str, package: Package, error: Exception, needed: bool) -> Finding:
    if isinstance(error, ModuleNotFoundError) and error.name == package.module:
        return Finding(part, package.module, "missing", f"not installed: {package.use}", _pip(package), needed)
    is_incomplete = isinstance(error, ModuleNotFoundError)
    fix = _pip(package) if is_incomplete else f"pip install --force-reinstall --no-deps {_requirement(package)}"
    return Finding(part, package.module, "failed", f"does not import: {essence(error)}", fix, needed)


def _version(module: Any, package: Package) -> str:
    return str(getattr(module, "__version__", None) or metadata.version(package.distribution))


def _wanted_versions(package: Package) -> Any:
    """Return the versions that compiled-llm's own metadata asks for, or None if it names none."""
    try:
        from packaging.requirements import Requirement

        lines = metadata.requires("compiled-llm") or []
    except ImportError:  # a checkout on the path has no metadata (PackageNotFoundError is an ImportError)
        return None
    requirements = (Requirement(line) for line in lines)
    return next((entry.specifier for entry in requirements if entry.name == package.distribution), None)


def _pip(package: Package) -> str:
    if package.extra:
        return f"pip install 'compiled-llm[{package.extra}]'"
    return f"pip install {_requirement(package)}"


def _requirement(package: Package) -> str:
    return f"'{package.distribution}{_wanted_versions(package) or ''}'"


def _torch_build(torch: Any) -> str:
    if torch.version.cuda:
        return f"built for CUDA {torch.version.cuda}"
    return f"built for ROCm {torch.version.hip}" if torch.version.hip else "built for the CPU"


def _flashinfer(cuda: bool) -> Finding:
    found = _package("packages", FLASHINFER, needed=cuda)
    if found.status == "missing" and not cuda:
        return Finding("packages", "flashinfer", "not needed", f"not installed: {FLASHINFER.use}")
    if (problem := _missing("FlashInfer")) and cuda:
        detail, fix = problem
        return Finding("packages", "flashinfer", "missing", detail, fix, needed=True)
    return found


def _triton(cuda: bool) -> Finding:
    found = _package("packages", TRITON, needed=cuda)
    if found.status == "missing" and not cuda:
        return Finding("packages", "triton", "not needed", f"not installed: {TRITON.use}")
    return found


def _missing(what: str) -> tuple[str, str] | None:
    """Return what `wrap` says is missing for CUDA, and the way out, if it is this."""
    from compiled_llm_ops.flashinfer.plan import missing_for_cuda

    message = next((message for message in missing_for_cuda() if message.startswith(f"{what} ")), None)
    if message is None:
        return None
    detail, _, fix = " ".join(message.split()).rpartition(": ")
    return detail, fix


# ---- devices


def _driver() -> Finding:
    version = _nvidia_driver()
    if version is None:
        return Finding("devices", "NVIDIA driver", "not needed", "none")
    return Finding("devices", "NVIDIA driver", "ok", version)


def _nvidia_driver() -> str | None:
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        if lines := _output(command).splitlines():
            return lines[0]
    module = Path("/proc/driver/nvidia/version")
    if not module.exists():
        return None
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", module.read_text())
    return "of unknown version" if found is None else found[0]


def _devices() -> list[Finding]:
    import torch

    return [_device(index) for index in range(torch.cuda.device_count())]


def _device(index: int) -> Finding:
    """Return what one GPU is; only the first one, which `cuda` stands for, is needed."""
    import torch

    name, needed = f"cuda:{index}", index == 0
    try:
        capability = torch.cuda.get_device_capability(index)
        free, total = torch.cuda.mem_get_info(index)
        detail = f"{torch.cuda.get_device_name(index)}, compute capability {capability[0]}.{capability[1]}, "
    except Exception as error:
        return Finding("devices", name, "failed", essence(error), "see what nvidia-smi says", needed)
    detail += f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB free"
    if capability < _OLDEST_CAPABILITY:
        detail += f": FlashInfer needs {_OLDEST_CAPABILITY[0]}.{_OLDEST_CAPABILITY[1]}"
        return Finding("devices", name, "failed", detail, "run on the CPU: --device cpu", needed)
    if capability < _BFLOAT16_CAPABILITY:
        return Finding("devices", name, "warning", f"{detail}, no bfloat16", "load models with dtype=float16", needed)
    if free < _LITTLE_MEMORY:
        return Finding("devices", name, "warning", detail, "see in nvidia-smi what else runs there", needed)
    return Finding("devices", name, "ok", detail, needed=needed)


def _no_device() -> Finding:
    import torch

    driver = _nvidia_driver()
    if driver is None:
        return Finding("devices", "CUDA", "not needed", "no device: models run on the CPU")
    detail = f"there is an NVIDIA driver ({driver}), but torch sees no device, so models run on the CPU"
    if torch.version.cuda is None:
        fix = "pip install --force-reinstall torch (from PyPI, whose build is for CUDA)"
        return Finding("devices", "CUDA", "warning", f"{detail}: this torch is not built for CUDA", fix)
    return Finding("devices", "CUDA", "warning", f"{detail}: {_why_no_device()}", "see what nvidia-smi says")


def _why_no_device() -> str:
    import torch

    try:
        torch.cuda.init()
    except Exception as error:
        return essence(error)
    return f"CUDA_VISIBLE_DEVICES is {os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}"


def _cpu() -> Finding:
    import torch

    from compiled_llm.kvcache.memory import free_bytes

    free = free_bytes(torch.device("cpu"))
    status: Status = "ok" if free >= _LITTLE_MEMORY else "warning"
    return Finding("devices", "CPU", status, f"{os.cpu_count()} cores, {free / _GIB:.1f} GiB of memory free")


# ---- compilers


def _cxx() -> Finding:
    from compiled_llm.compat import cpp_compiler
    from compiled_llm.model.checks import missing_compiler

    if (missing := missing_compiler()) is not None:
        detail, _, fix = missing.partition("; ")
        return Finding("compilers", "C++ compiler", "missing", detail, fix, needed=True)
    path = shutil.which(cpp_compiler()) or cpp_compiler()
    return Finding("compilers", "C++ compiler", "ok", f"{_tool_version(path, '.+')}, {path}", needed=True)


def _headers() -> Finding:
    """Look for what the C++ that Inductor and Triton write includes."""
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if header.exists():
        return Finding("compilers", "Python headers", "ok", str(header.parent), needed=True)
    fix = f"install this Python's development package, for example with 'apt install python3.{sys.version_info[1]}-dev'"
    return Finding("compilers", "Python headers", "missing", f"{header} is not there", fix, needed=True)


def _nvcc(cuda: bool) -> Finding:
    return _cuda_tool("nvcc", find_nvcc(), "release.*", cuda)


def _ninja(cuda: bool) -> Finding:
    return _cuda_tool("ninja", shutil.which("ninja"), ".+", cuda)


def _cuda_tool(name: str, path: str | None, version: str, cuda: bool) -> Finding:
    """Return whether FlashInfer finds a program that it builds kernels with."""
    if cuda and (missing := _missing(name)):
        return Finding("compilers", name, "missing", *missing, needed=True)
    if path is None:
        why = "flashinfer-jit-cache brings the kernels along" if has_built_kernels() else "only for CUDA"
        return Finding("compilers", name, "not needed", f"not found: {why}")
    return Finding("compilers", name, "ok", f"{_tool_version(path, version)}, {path}", needed=cuda)


def find_nvcc() -> str | None:
    """Return the nvcc that FlashInfer runs."""
    from compiled_llm_ops.flashinfer import plan as flashinfer_backend

    return flashinfer_backend._nvcc()


def has_built_kernels() -> bool:
    """Whether FlashInfer's kernels are installed already built."""
    return importlib.util.find_spec("flashinfer_jit_cache") is not None


def _tool_version(path: str, pattern: str) -> str:
    found = re.search(pattern, _output([path, "--version"]))
    return "of unknown version" if found is None else found[0].strip()


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise RuntimeError(f"{command[0]} fails: {(done.stderr or done.stdout).strip()}")
    return done.stdout.strip()


# ---- caches


def _cache(name: str, folder: Path, variable: str) -> Finding:
    parent = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        tempfile.TemporaryFile(dir=parent).close()  # access rights alone do not tell, least of all root
    except OSError as error:
        fix = f"make it writable, or set {variable} to another folder"
        return Finding("caches", name, "warning", f"{folder}, not writable: {error.strerror}", fix)
    return Finding("caches", name, "ok", f"{folder}, {_size(folder)}")


def _size(folder: Path) -> str:
    if not folder.exists():
        return "empty"
    return f"{sum(_bytes_in(folder)) / 2**20:,.1f} MiB"


def _bytes_in(folder: Path) -> Iterator[int]:
    for path, _, files in os.walk(folder):
        for file in files:
            try:
                yield os.lstat(os.path.join(path, file)).st_size
            except OSError:  # another process has removed it
                continue


def _own_cache() -> Finding:
    return _cache("compiled_llm", Env.from_environ().cache, "COMPILED_LLM_CACHE")


def _inductor_cache() -> Finding:
    from compiled_llm.compat import inductor_cache

    return _cache("Inductor", inductor_cache(), "TORCHINDUCTOR_CACHE_DIR")


def _flashinfer_cache() -> Finding:
    if importlib.util.find_spec("flashinfer") is None:
        return Finding("caches", "FlashInfer", "not needed", "flashinfer is not installed")
    folder = importlib.import_module("flashinfer.jit.env").FLASHINFER_CACHE_DIR
    return _cache("FlashInfer", folder, "FLASHINFER_WORKSPACE_BASE")
