"""Checks for FlashInfer's installation: a known version, and a compiler for its kernels."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil

from compiled_llm_ops.flashinfer.versions import NEWEST_EXCLUSIVE, OLDEST, version_of


def missing_for_cuda(builds: bool = True) -> list[str]:
    """Return why the ops cannot run on CUDA, each with the way out; ``builds``: FlashInfer has to compile kernels."""
    missing = []
    if problem := flashinfer_problem():
        missing.append(problem)
    if not builds or has_built_kernels():
        return missing
    if find_nvcc() is None:
        missing.append(
            "nvcc is not found, with which FlashInfer compiles its kernels (looked at FLASHINFER_NVCC, CUDA_HOME, "
            "CUDA_PATH, PATH and /usr/local/cuda): install the CUDA toolkit and set CUDA_HOME to it, or install the "
            "flashinfer-jit-cache of your CUDA version, which brings the kernels along"
        )
    if shutil.which("ninja") is None:
        missing.append(
            "ninja is not on PATH, with which FlashInfer compiles its kernels: pip install ninja, and activate the "
            "environment (or put its bin folder on PATH)"
        )
    return missing


def has_built_kernels() -> bool:
    """Whether flashinfer-jit-cache brings the kernels along, so that nothing is compiled."""
    return importlib.util.find_spec("flashinfer_jit_cache") is not None


def flashinfer_problem() -> str | None:
    """Return why FlashInfer cannot be used, and the way out; None if it can."""
    try:
        flashinfer = importlib.import_module("flashinfer")
    except Exception as error:  # a mismatched flashinfer-jit-cache raises RuntimeError, a broken CUDA OSError
        return f'FlashInfer does not import ({error}): pip install ".[cuda]"'
    if not OLDEST <= version_of(flashinfer) < NEWEST_EXCLUSIVE:
        return (
            f"FlashInfer {flashinfer.__version__} is outside 0.6.13 to 0.7, the versions that are supported: "
            'pip install "flashinfer-python>=0.6.13,<0.8"'
        )
    return None


def find_nvcc() -> str | None:
    """Return the nvcc that FlashInfer would run, looking where it looks and in its order."""
    if compiler := os.environ.get("FLASHINFER_NVCC"):
        return shutil.which(compiler)
    if home := os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"):
        return shutil.which(os.path.join(home, "bin", "nvcc"))
    return shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
