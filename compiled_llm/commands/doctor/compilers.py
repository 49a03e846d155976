"""What kernels are built with here: C++ by Inductor and Triton, CUDA by FlashInfer."""

from __future__ import annotations

import shutil
import sys
import sysconfig
from pathlib import Path

from compiled_llm.commands.doctor.finding import Finding
from compiled_llm.commands.doctor.packages import missing_for_cuda
from compiled_llm.commands.doctor.programs import version_of


def cxx() -> Finding:
    """Look for the C++ compiler that Inductor and Triton run."""
    from compiled_llm.compat import cpp_compiler
    from compiled_llm.model.checks import missing_compiler

    if (missing := missing_compiler()) is not None:
        detail, _, fix = missing.partition("; ")
        return Finding("compilers", "C++ compiler", "missing", detail, fix, needed=True)
    path = shutil.which(cpp_compiler()) or cpp_compiler()
    return Finding("compilers", "C++ compiler", "ok", f"{version_of(path)}, {path}", needed=True)


def python_headers() -> Finding:
    """Look for what the C++ that Inductor and Triton write includes."""
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if header.exists():
        return Finding("compilers", "Python headers", "ok", str(header.parent), needed=True)
    fix = f"install this Python's development package, for example with 'apt install python3.{sys.version_info[1]}-dev'"
    return Finding("compilers", "Python headers", "missing", f"{header} is not there", fix, needed=True)


def nvcc(cuda: bool) -> Finding:
    """Look for the nvcc that FlashInfer runs."""
    return _cuda_tool("nvcc", find_nvcc(), "release.*", cuda)


def ninja(cuda: bool) -> Finding:
    """Look for the ninja that FlashInfer runs."""
    return _cuda_tool("ninja", shutil.which("ninja"), ".+", cuda)


def find_nvcc() -> str | None:
    """Return the nvcc that FlashInfer builds its kernels with, if it has to build them."""
    from compiled_llm_ops.backends import backend_named

    return backend_named("flashinfer").compiler()


def _cuda_tool(name: str, path: str | None, version: str, cuda: bool) -> Finding:
    if cuda and (missing := missing_for_cuda(name)):
        return Finding("compilers", name, "missing", *missing, needed=True)
    if path is None:
        why = "FlashInfer's kernels are installed already built" if cuda else "not found: only CUDA needs it"
        return Finding("compilers", name, "not needed", why)
    return Finding("compilers", name, "ok", f"{version_of(path, version)}, {path}", needed=cuda)
