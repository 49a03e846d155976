"""Kernels that FlashInfer built in another process, and how many it builds in this one."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Any

_folders: list[Path] = []
_built = [0]


def find_kernels_in(folder: Path) -> None:
    """Let FlashInfer look for ``NAME/NAME.so`` in a folder before it looks elsewhere or builds it, for this process.

    A kernel's name says all that it was built for but FlashInfer's version, CUDA's and the device's.
    """
    _folders.append(folder)
    _look_in_folders()


def kernels_built() -> int:
    """Return how many kernels FlashInfer has built, or looked through whether it has to, since the first folder."""
    return _built[0]


@functools.cache
def _look_in_folders() -> None:
    look_in_folders(importlib.import_module("flashinfer.jit.core").JitSpec)


def look_in_folders(spec: type[Any]) -> None:
    """Change the class that describes a kernel so that it finds ours like those of flashinfer-jit-cache.

    Args:
        spec: FlashInfer's ``JitSpec``.
    """
    elsewhere, build = vars(spec)["aot_path"].fget, spec.build

    def path(kernel: Any) -> Path:
        places = (folder / kernel.name / f"{kernel.name}.so" for folder in _folders)
        found: Path = next((place for place in places if place.exists()), None) or elsewhere(kernel)
        return found

    @functools.wraps(build)
    def counted(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        _built[0] += 1
        return build(kernel, *args, **kwargs)

    spec.aot_path, spec.build = property(path), counted
