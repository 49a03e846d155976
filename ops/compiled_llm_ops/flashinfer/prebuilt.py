"""Kernels that FlashInfer built in another process, and how many it builds in this one."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Any

_folders: list[Path] = []
_built = [0]


def find_kernels_in(folder: Path) -> None:
    """Let FlashInfer look for ``NAME/NAME.so`` in a folder before it looks elsewhere or builds it, for this process."""
    # A kernel's name covers all that it was built for but FlashInfer's version, CUDA's and the device's.
    _folders.append(folder)
    _look_in_folders()


def kernels_built() -> int:
    """Return how many kernels FlashInfer had to build, or look over, since the first folder was given."""
    return _built[0]


def kernels_are_given() -> bool:
    """Whether this process was given kernels that another one has built."""
    return bool(_folders)


def is_built(name: str) -> bool:
    """Whether a kernel, by FlashInfer's name, need not be built: it is given, installed, or in FlashInfer's cache."""
    env: Any = importlib.import_module("flashinfer.jit.env")
    places = (*_folders, env.FLASHINFER_AOT_DIR, env.FLASHINFER_JIT_DIR)
    return any((Path(place) / name / f"{name}.so").exists() for place in places)


@functools.cache
def _look_in_folders() -> None:
    look_in_folders(importlib.import_module("flashinfer.jit.core").JitSpec)


def look_in_folders(spec: type[Any]) -> None:
    """Change FlashInfer's ``JitSpec``, which in 0.7 has a subclass that builds, so that it loads our kernels."""
    build_and_load = spec.build_and_load

    @functools.wraps(build_and_load)
    def load(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        places = (folder / kernel.name / f"{kernel.name}.so" for folder in _folders)
        if (found := next((place for place in places if place.exists()), None)) is not None:
            return kernel.load(found)
        _built[0] += not getattr(kernel, "is_aot", False)  # those of flashinfer-jit-cache come built
        return build_and_load(kernel, *args, **kwargs)

    spec.build_and_load = load
