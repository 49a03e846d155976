"""Triton kernels that were built before, found in a folder of artifacts in place of Triton's own cache."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from compiled_llm.env import replaced

logger = logging.getLogger("compiled_llm.graphs")

_folders: list[Path] = []
_own: list[str] = []
"""Where Triton's own cache lies while the environment names one of our folders."""
_built: list[str] = []

_PLACE = "TRITON_CACHE_DIR"


def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def find_kernels_in(folder: Path) -> None:
    """Let Triton look in a folder like its cache before it looks into that, for this process."""
    # A kernel's key covers all that its code depends on, so a hit is the code that Triton would have built. Missing
    # kernels are built, and kept where they always were.
    _folders.append(folder)
    _look_in_folders()


def forget_kernels_in(folder: Path) -> None:
    """Stop looking there."""
    if folder in _folders:
        _folders.remove(folder)


def choose_cache(device: int) -> None:
    """Make Triton keep what it builds beside Inductor's cache from now on, unless the environment says where."""
    # Inductor sets that once it makes a kernel of Triton's in this process. Without this it would depend on the speed
    # of its processes where our own kernels are kept, and looked for.
    if _PLACE not in os.environ:
        from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

        os.environ[_PLACE] = triton_cache_dir(device)


@contextmanager
def kernels_first_in(folder: Path, own: str) -> Iterator[None]:
    """Let Triton look in a folder before its ``own`` cache while the block runs, and build into that alone."""
    # Both as `TRITON_CACHE_DIR` would name them, which names the folder meanwhile: Inductor looks for kernels there
    # that it launches without Triton. What the folder lacks are Triton's bindings to CUDA, and what launches kernels.
    _own.append(own)
    find_kernels_in(folder)
    try:
        yield
    finally:
        forget_kernels_in(folder)
        _own.pop()


def kernels_built() -> list[str]:
    """Return the files that Triton has not found anywhere, since it was first told of a folder."""
    # Those of kernels end in ``.json``. Those that a C compiler makes end in ``.so``: launchers for kernels of one
    # signature, and Triton's bindings to CUDA.
    return list(_built)


def _count(file: str) -> None:
    _built.append(file)
    logger.info("Triton builds %s, which is in no folder of artifacts", file)


@functools.cache
def _look_in_folders() -> None:
    """Set a cache manager of Triton's that looks there; no other code uses that setting at the same time."""
    knobs = importlib.import_module("triton.knobs").cache
    knobs.manager_class = layered(
        knobs.manager_class or importlib.import_module("triton.runtime.cache").FileCacheManager
    )


def layered(base: type[Any]) -> type[Any]:
    """Return a cache manager that reads the entries of our folders in place of those of ``base``."""

    class Layered(base):  # type: ignore[misc]
        """One entry: our folder's if it is there, else that of ``base``."""

        def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
            found = [] if override or dump else [folder / key for folder in _folders if (folder / key).is_dir()]
            self._counts, self._is_ours = not (override or dump), bool(found)
            if not found:
                with replaced({_PLACE: _own[-1]} if _own and _own[-1] else {}):
                    super().__init__(key, override=override, dump=dump) if override or dump else super().__init__(key)
                return
            self.key, self.cache_dir, self.lock_path = key, str(found[0]), str(found[0] / "lock")

        def get_group(self, filename: str) -> object:
            """Return the files of a kernel; None if it has to be built, which is counted."""
            group = _group_in(Path(self.cache_dir), filename) if self._is_ours else super().get_group(filename)
            if not group and self._counts:
                _count(filename)
            return group

        def get_file(self, filename: str) -> object:
            """Return the path of a file; None if it has to be made, which is counted if it takes a C compiler."""
            file = super().get_file(filename)
            if file is None and self._counts and filename.endswith(".so"):
                _count(filename)
            return file

    return Layered


def _group_in(folder: Path, filename: str) -> dict[str, str] | None:
    """Return the files of a kernel that are in a folder, wherever they were when Triton wrote down where they are."""
    group = folder / f"__grp__{filename}"
    if not group.exists():
        return None
    names = json.loads(group.read_bytes()).get("child_paths", {})
    return {name: str(folder / name) for name in names if (folder / name).exists()}
