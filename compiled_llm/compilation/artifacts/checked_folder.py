"""Reads a folder of artifacts: its content is trusted only once its owner and checksums are verified."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from compiled_llm.compilation.artifacts.manifest import NAME, Manifest, ManifestEntry

ROOT = 0  # Root's user id: a machine has to trust root

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class RefusedError(ValueError):
    """A folder of artifacts that must not be used; the message says why, without its name."""


def manifest_of(folder: Path) -> Manifest:
    """Return a folder's manifest; RefusedError if there is none, other users can write it, or it is damaged."""
    check_folder(folder)
    try:
        return Manifest.decoded(_content(folder / NAME))
    except FileNotFoundError:
        raise RefusedError(f"has no {NAME}: it is not of artifacts, or was never finished") from None
    except RefusedError:
        raise
    except ValueError as error:
        raise RefusedError(f"cannot be read: {NAME} {error}") from None


def copy(folder: Path, manifest: Manifest, into: Path) -> None:
    """Copy files that match the manifest into a new folder of this user's, or raise RefusedError."""
    for name, content in checked(folder, manifest):
        target = into / name
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        target.write_bytes(content)


def checked(folder: Path, manifest: Manifest) -> Iterator[tuple[str, bytes]]:
    """Yield the name and content of each file that matches the manifest, or raise RefusedError."""
    found = set()
    for path in _files_in(folder):
        name = path.relative_to(folder).as_posix()
        if name == NAME:
            continue
        yield name, content_of(folder, manifest, name)
        found.add(name)
    if missing := sorted(manifest.files.keys() - found):
        raise RefusedError(f"is not whole: {missing[0]} is missing")


def content_of(folder: Path, manifest: Manifest, name: str) -> bytes:
    """Return the content of one file of a folder, if it matches the manifest, or raise RefusedError."""
    if (entry := manifest.files.get(name)) is None:
        raise RefusedError(f"is not whole: {name} is not in its manifest")
    try:
        content = _content(folder / name, entry.nbytes)
    except FileNotFoundError:
        raise RefusedError(f"is not whole: {name} is missing") from None
    if ManifestEntry.of(content) != entry:
        raise RefusedError(f"is damaged: {name} is not what it was")
    return content


def check_folder(folder: Path) -> None:
    """Raise RefusedError unless it is a folder that no user but this one and root can write to."""
    _check_owner(folder, _status_of(folder), stat.S_ISDIR)


def _files_in(folder: Path) -> Iterator[Path]:
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        path = Path(entry.path)
        if entry.is_dir(follow_symlinks=False):
            check_folder(path)
            yield from _files_in(path)
        else:
            yield path


def _content(path: Path, most: int = 2**26) -> bytes:
    """Return the content of a regular file that no other user can have written, at most ``most`` bytes and one more."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise RefusedError(f"cannot be read: {path.name} is a link, or no file ({error.strerror})") from None
    with os.fdopen(handle, "rb") as file:
        _check_owner(path, os.fstat(handle), stat.S_ISREG)
        return file.read(most + 1)


def _status_of(folder: Path) -> os.stat_result:
    try:
        return folder.lstat()
    except OSError as error:
        raise RefusedError(f"cannot be read: {error.strerror}") from None


def _check_owner(path: Path, status: os.stat_result, is_kind: object) -> None:
    assert callable(is_kind)
    if not is_kind(status.st_mode):
        raise RefusedError(f"cannot be used: {path.name} is a link, or neither a file nor a folder of artifacts")
    if status.st_uid not in (os.geteuid(), ROOT):
        raise RefusedError(f"is not trusted: {path.name} belongs to another user, and what is in it would be run")
    if status.st_mode & _OTHERS_WRITE:
        raise RefusedError(
            f"is not trusted: others may write {path.name} (chmod -R go-w), and what is in it would be run"
        )
