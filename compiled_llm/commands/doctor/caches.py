"""The folders that keep what was downloaded and built: where they are, how large, and whether they can be written."""

from __future__ import annotations

import importlib
import importlib.util
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from compiled_llm.commands.doctor.finding import Finding
from compiled_llm.env import Env


def compiled_llm() -> Finding:
    """Look at the folder of downloads."""
    return _cache("compiled_llm", Env.from_environ().cache, "COMPILED_LLM_CACHE")


def inductor() -> Finding:
    """Look at the folder of compiled graphs."""
    from compiled_llm.compat import inductor_cache

    return _cache("Inductor", inductor_cache(), "TORCHINDUCTOR_CACHE_DIR")


def flashinfer() -> Finding:
    """Look at the folder of FlashInfer's kernels."""
    if importlib.util.find_spec("flashinfer") is None:
        return Finding("caches", "FlashInfer", "not needed", "flashinfer is not installed")
    folder = importlib.import_module("flashinfer.jit.env").FLASHINFER_CACHE_DIR
    return _cache("FlashInfer", folder, "FLASHINFER_WORKSPACE_BASE")


def _cache(name: str, folder: Path, variable: str) -> Finding:
    from compiled_llm.model.checks import belongs_to_another

    parent = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        tempfile.TemporaryFile(dir=parent).close()  # access rights alone do not tell, least of all root
    except OSError as error:
        fix = f"make it writable, or set {variable} to another folder"
        return Finding("caches", name, "warning", f"{folder}, not writable: {error.strerror}", fix)
    if belongs_to_another(folder):
        fix = f"set {variable} to a folder of your own, unless you trust everybody who can write there"
        return Finding("caches", name, "warning", f"{folder} belongs to another user", fix)
    return Finding("caches", name, "ok", f"{folder}, {_size(folder)}")


def _size(folder: Path) -> str:
    if not folder.exists():
        return "empty"
    return f"{sum(_file_sizes(folder)) / 2**20:,.1f} MiB"


def _file_sizes(folder: Path) -> Iterator[int]:
    for path, _, files in os.walk(folder):
        for file in files:
            try:
                yield os.lstat(os.path.join(path, file)).st_size
            except OSError:  # another process has removed it
                continue
