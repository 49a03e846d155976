"""The packages that compiled_llm uses: their versions, and how to get those that are missing."""

from __future__ import annotations

import importlib
import platform
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import compiled_llm
from compiled_llm.commands.doctor.finding import Finding, essence


class Package(NamedTuple):
    """A package to look for.

    Attributes:
        module: what is imported.
        distribution: what pip calls it.
        extra: the extra of compiled-llm that brings it; empty for what compiled-llm itself requires.
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
)


def python() -> Finding:
    """Return which Python runs this, and on what."""
    here = f"{platform.python_version()}, {sys.platform} {platform.machine()}, {sys.executable}"
    if sys.platform != "linux":
        return Finding("packages", "Python", "warning", f"{here}: only Linux is tested", needed=True)
    return Finding("packages", "Python", "ok", here, needed=True)


def ourselves() -> Finding:
    """Import all of compiled_llm, and with it what it uses of torch and transformers."""
    here = f"{compiled_llm.__version__}, {Path(compiled_llm.__file__).parent}"
    try:
        importlib.import_module("compiled_llm.huggingface.wrap")
    except Exception as error:
        return Finding("packages", "compiled_llm", "failed", f"{here}, does not import: {essence(error)}", needed=True)
    return Finding("packages", "compiled_llm", "ok", here, needed=True)


def required(package: Package) -> Finding:
    """Import a package without which nothing runs."""
    return _package("packages", package, needed=True)


def optional(package: Package) -> Finding:
    """Import a package that some commands use."""
    found = _package("extras", package, needed=False)
    return replace(found, status="optional") if found.status == "missing" else found


def flashinfer(cuda: bool) -> Finding:
    """Import FlashInfer, of a version that the ops know."""
    if cuda and (problem := missing_for_cuda("FlashInfer")):
        return Finding("packages", "flashinfer", "missing", *problem, needed=True)
    return _for_cuda(FLASHINFER, cuda)


def triton(cuda: bool) -> Finding:
    """Import Triton."""
    return _for_cuda(TRITON, cuda)


def missing_for_cuda(what: str) -> tuple[str, str] | None:
    """Return what `wrap` would miss on CUDA, and the way out, if it is this."""
    from compiled_llm_ops.backends import backend_named

    problems = backend_named("flashinfer").problems()
    message = next((message for message in problems if message.startswith(f"{what} ")), None)
    if message is None:
        return None
    detail, _, fix = " ".join(message.split()).rpartition(": ")
    return detail, fix


def _for_cuda(package: Package, cuda: bool) -> Finding:
    found = _package("packages", package, needed=cuda)
    return found if cuda or found.status != "missing" else replace(found, status="not needed", fix="")


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
    if isinstance(error, ModuleNotFoundError) and error.name in (package.module, package.module.partition(".")[0]):
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
        return f"pip install '.[{package.extra}]'"
    return f"pip install {_requirement(package)}"


def _requirement(package: Package) -> str:
    return f"'{package.distribution}{_wanted_versions(package) or ''}'"


def _torch_build(torch: Any) -> str:
    if torch.version.cuda:
        return f"built for CUDA {torch.version.cuda}"
    return f"built for ROCm {torch.version.hip}" if torch.version.hip else "built for the CPU"
