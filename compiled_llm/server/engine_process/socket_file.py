"""The file of a Unix socket: no other user may open it, one that was left behind is replaced, a live one is not."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LONGEST = 107  # bytes of a path that the kernel takes
_QUEUE = 128  # connections that wait to be accepted, at most
_PATIENCE = 5.0  # seconds in which another process has made, or removed, its socket


def listen(path: Path, of: str = "") -> socket.socket:
    """Return a socket that listens at a path, for this user alone; a folder that is missing is made so, too.

    Raises:
        ValueError: the path is too long, or lies in a folder where others could replace the socket.
        RuntimeError: another process listens there, or another file lies there.
        OSError: the folder cannot be read or written.
    """
    if len(os.fsencode(path)) > _LONGEST:
        raise ValueError(f"{of}uds={str(path)!r}: the path of a socket can have {_LONGEST} bytes; give a shorter one")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    for folder in (path.parent.resolve(), *path.parent.resolve().parents):
        _check_folder(folder, of)
    with _alone_in(path.parent):
        if not _remove_stale(path, of):
            raise RuntimeError(
                f"{of}uds={str(path)!r}: an engine process listens there already; stop it, or give another path"
            )
        return _bound(path)


def remove(path: Path) -> None:
    """Remove the file of a socket that was closed; if another process listens there by now, it stays."""
    with _alone_in(path.parent):
        _remove_stale(path)


def _check_folder(folder: Path, of: str) -> None:
    found = folder.stat()
    others_write = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX
    if others_write or found.st_uid not in (0, os.geteuid()):
        raise ValueError(
            f"{of}uds: others may write into {str(folder)!r}, and could put a socket of theirs in the place of this "
            "one; give a path in a folder of your own"
        )


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Keep other engine processes from changing sockets of a folder for the block."""
    handle, deadline = os.open(folder, os.O_RDONLY | os.O_DIRECTORY), time.monotonic() + _PATIENCE
    try:
        while not _locked(handle):
            if time.monotonic() > deadline:
                raise RuntimeError(f"uds: another process has locked the folder {str(folder)!r}; give another path")
            time.sleep(0.01)
        yield
    finally:
        os.close(handle)


def _locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_stale(path: Path, of: str = "") -> bool:
    """Remove a socket at which no process listens, and return whether there is none now."""
    try:
        kind = path.lstat().st_mode
    except FileNotFoundError:
        return True
    if not stat.S_ISSOCK(kind):
        raise RuntimeError(f"{of}uds={str(path)!r}: a file lies there that is no socket; give another path")
    if _is_live(path):
        return False
    path.unlink()
    return True


def _is_live(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # an engine process whose queue is full does not answer
        return probe.connect_ex(str(path)) != errno.ECONNREFUSED


def _bound(path: Path) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.bind(str(path))
        path.chmod(0o600)  # before a client can connect
        listening.listen(_QUEUE)
    except BaseException:
        listening.close()
        raise
    return listening
