"""One program in a folder of its own, with a manifest of its files."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from compiled_llm.compilation.artifacts.checked_folder import checked, content_of, manifest_of
from compiled_llm.compilation.artifacts.manifest import NAME, Manifest, ManifestEntry
from compiled_llm.compilation.kept.cache.room import UNFINISHED, remove
from compiled_llm.compilation.kept.call import RegionCalls
from compiled_llm.compilation.kept.kept_program import KeptProgram

_PROGRAM = "program.json"


def said_in_names(name: str) -> str:
    """Return the name of a program as folders have it; a hash comes after it."""
    return re.sub(r"\W+", "-", name)


class CacheEntry:
    """A program that was read; its code is read, and compared, when it is loaded."""

    def __init__(self, folder: Path, program: KeptProgram, manifest: Manifest) -> None:
        self.program = program
        self.folder = folder
        self._manifest = manifest

    @classmethod
    def read(cls, folder: Path, made_for: Mapping[str, Any]) -> CacheEntry:
        """Read a folder that ``write`` has made; ValueError if it is damaged, unsafe or of something else."""
        manifest = manifest_of(folder)
        if manifest.made_for != made_for:
            raise ValueError("it was made for something else")
        return cls(folder, KeptProgram.decoded(content_of(folder, manifest, _PROGRAM)), manifest)

    def load(self) -> RegionCalls:
        """Return its calls, and let it count as just used; it is removed if that raises, by errors of any type."""
        try:
            for _ in checked(self.folder, self._manifest):
                pass
            calls = RegionCalls(self.program, self.folder)
        except Exception:
            remove(self.folder)
            raise
        with suppress(OSError):  # a folder of root's, in an image of a container
            os.utime(self.folder)
        return calls


def write(
    into: Path, program: KeptProgram, files: Mapping[str, Path], made_for: Mapping[str, Any], staging: Path
) -> Path | None:
    """Write a program, with its files by where they lie there, into a folder of its own in ``into``, and return that.

    It is written in ``staging``, on the same file system. None if it is there already; OSError if it cannot be written.
    """
    contents = {_PROGRAM: program.encoded()}
    target = into / f"{said_in_names(program.name)}-{hashlib.sha256(contents[_PROGRAM]).hexdigest()[:16]}"
    if target.exists():
        return None
    contents |= {place: file.read_bytes() for place, file in files.items()}
    manifest = Manifest(made_for, 0, {name: ManifestEntry.of(content) for name, content in contents.items()})
    folder = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=staging))
    try:
        for name, content in {**contents, NAME: manifest.encoded()}.items():
            for part in reversed(Path(name).parents):
                (folder / part).mkdir(mode=0o700, exist_ok=True)
            _write_file(folder / name, content)
        into.mkdir(mode=0o700, exist_ok=True)
        os.rename(folder, target)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        if target.exists():  # another process was first
            return None
        raise
    return target


def _write_file(path: Path, content: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
