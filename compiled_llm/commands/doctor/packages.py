"""The packages that compiled_llm uses: their versions, and how to get those that are missing."""

from __future__ import annotations

import importlib
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import compiled_llm
from compiled_llm.commands.doctor.finding import Outcome, Status, essence


class Package(NamedTuple):
    """A package: the module to import, the name for pip, the extra that brings it if one does, and its use."""

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
    Package("prompt_toolkit", "prompt-toolkit", "demo", "reads what is typed in `chat`"),
    Package("msgspec", "msgspec", "server", "what `serve` and its clients say to each other"),
    Package("fastapi", "fastapi", "server", "answers HTTP"),
    Package("uvicorn", "uvicorn", "server", "listens for HTTP"),
    Package("httptools", "httptools", "server", "takes requests of HTTP apart"),
    Package("pydantic", "pydantic", "server", "reads requests of HTTP"),
    Package("jinja2", "jinja2", "server", "writes chats as the model reads them"),
    Package("prometheus_client", "prometheus-client", "server", "writes /metrics"),
    Package("xgrammar", "xgrammar", "structured", "compiles the grammars that answers follow"),
    Package("ray.serve", "ray", "ray", "runs replicas of a server"),
    Package("depyf", "depyf", "debug", "shows the code that Dynamo and Inductor wrote"),
    Package("matplotlib", "matplotlib", "bench", "draws what bench has measured"),
    Package("httpx", "httpx", "bench", "asks servers for `bench serve`"),
)


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
    return Outcome("ok", here)


def flashinfer(cuda: bool) -> Outcome:
    missing = missing_for_cuda("FlashInfer") if cuda else None
    return missing or imported(FLASHINFER, "missing" if cuda else "not needed")


def missing_for_cuda(what: str) -> Outcome | None:
    """Return that `wrap` would miss this on CUDA, and the way out, if so it is."""
    from compiled_llm_ops.backends import backend_named

    for message in backend_named("flashinfer").installation.problems():
        if message.startswith(f"{what} "):
            detail, _, fix = " ".join(message.split()).rpartition(": ")
            return Outcome("missing", detail, fix)
    return None


def imported(package: Package, if_missing: Status = "missing") -> Outcome:
    """Import a package, and compare its version with those that compiled-llm supports."""
    supported = _supported_versions(package)
    requirement = f"'{package.distribution}{supported or ''}'"
    pip = f"pip install '.[{package.extra}]'" if package.extra else f"pip install {requirement}"
    try:
        module = importlib.import_module(package.module)
    except Exception as error:
        lacking = error.name if isinstance(error, ModuleNotFoundError) else None
        if lacking in (package.module, package.module.partition(".")[0]):
            return Outcome(if_missing, f"not installed: {package.use}", "" if if_missing == "not needed" else pip)
        fix = pip if lacking else f"pip install --force-reinstall --no-deps {requirement}"
        return Outcome("failed", f"does not import: {essence(error)}", fix)
    version = str(getattr(module, "__version__", None) or metadata.version(package.distribution))
    detail = f"{version}, {_torch_build(module)}" if package.module == "torch" else version
    if supported is None or supported.contains(version, prereleases=True):
        return Outcome("ok", detail)
    return Outcome("warning", f"{detail} is outside {supported}, the versions that are supported", pip)


def _supported_versions(package: Package) -> Any:
    """Return the versions that compiled-llm's own metadata asks for, or None if it names none."""
    try:
        from packaging.requirements import Requirement

        lines = metadata.requires("compiled-llm") or []
    except ImportError:  # a checkout on the path has no metadata (PackageNotFoundError is an ImportError)
        return None
    requirements = (Requirement(line) for line in lines)
    return next((entry.specifier for entry in requirements if entry.name == package.distribution), None)


def _torch_build(torch: Any) -> str:
    if torch.version.cuda:
        return f"built for CUDA {torch.version.cuda}"
    return f"built for ROCm {torch.version.hip}" if torch.version.hip else "built for the CPU"
