"""The room that programs may take: the oldest make room for others."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from compiled_llm.compilation.artifacts.writing import UNFINISHED

MOST_BYTES = 2**30
"""Of all programs together; one of a model of 30 layers takes about 1.3 MB."""

MOST_OF_A_NAME = 4
"""Of programs of one name and one key, each of which is compared before a call is traced."""

_STALE = 3600.0
"""Seconds after which a folder that is still unfinished has nobody who writes to it."""


class _Occupied(NamedTuple):
    used: float  # when it was last written or taken, in seconds
    folder: Path
    nbytes: int


def make_room(root: Path, most: int = MOST_BYTES) -> None:
    """Remove the oldest programs below a folder until they take ``most`` bytes, and what was never finished."""
    for folder in root.glob(f"{UNFINISHED}*"):
        if time.time() - _used(folder) > _STALE:
            shutil.rmtree(folder, ignore_errors=True)
    kept = sorted(_kept(root), reverse=True)
    room = most
    for each in kept:
        room -= each.nbytes
        if room < 0:
            remove(each.folder)


def newest(folders: Iterable[Path]) -> list[Path]:
    """Return folders, that which was last used first."""
    return sorted(folders, key=_used, reverse=True)


def remove(folder: Path) -> None:
    """Remove a program, and the folder of its key if it was the last one; whatever cannot be removed stays."""
    if folder.is_symlink():
        folder.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # it has others, or is gone
        folder.parent.rmdir()


def _kept(root: Path) -> Iterator[_Occupied]:
    for folder in root.glob("[!.]*/*"):
        yield _Occupied(_used(folder), folder, sum(_size(path) for path in folder.rglob("*")))


def _used(folder: Path) -> float:
    try:
        return folder.lstat().st_mtime
    except OSError:  # another process has removed it
        return 0.0


def _size(path: Path) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:
        return 0
