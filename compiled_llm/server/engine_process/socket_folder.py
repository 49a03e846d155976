"""A folder for an engine process's socket; one that a killed process has left is removed by the next to begin."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

_PREFIX = "compiled-llm-"
_LOCK = "lock"  # a file that the folder's process keeps locked; the kernel unlocks it however that process ends


class SocketFolder:
    """A folder that only this user can read, with a path for a ``socket`` and an empty folder for ``figures``."""

    def __init__(self) -> None:
        """Remove those whose processes have gone, too."""
        _remove_left_behind()
        self._folder, self._lock = _locked_folder()
        self.socket = self._folder / "engine"
        self.figures = self._folder / "figures"
        self.figures.mkdir()

    def remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._lock)


def _locked_folder() -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        with suppress(FileNotFoundError):  # another process has begun, and found it before it was locked
            lock = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.fstat(lock).st_nlink:
                return folder, lock
            os.close(lock)


def _remove_left_behind() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # of another user, or in use, or gone by now
            _remove_if_left(folder)


def _remove_if_left(folder: Path) -> None:
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        return
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    finally:
        os.close(lock)
