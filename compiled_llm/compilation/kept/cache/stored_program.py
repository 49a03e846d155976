"""One program in a folder: of its own, with a manifest of its files, or of artifacts, which was checked."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from compiled_llm.compilation.artifacts.checked_folder import checked, content_of, manifest_of
from compiled_llm.compilation.artifacts.manifest import NAME, Manifest, ManifestEntry
from compiled_llm.compilation.artifacts.writing import unfinished
from compiled_llm.compilation.kept.cache.room import remove
from compiled_llm.compilation.kept.call import RegionCalls
from compiled_llm.compilation.kept.kept_program import KeptProgram

_PROGRAM = "program.json"


def folder_name_of(name: str) -> str:
    """Return the name of a program as folders have it; a hash comes after it."""
    return re.sub(r"\W+", "-", name)


class StoredProgram:
    """A program that was read; its code is read when it is loaded, and compared before if it has a manifest."""

    def __init__(self, program: KeptProgram, folder: Path, manifest: Manifest | None = None) -> None:
        """``folder`` has the caches of Inductor and Triton."""
        self.program = program
        self.folder = folder
        self._manifest = manifest

    @classmethod
    def read(cls, folder: Path, made_for: Mapping[str, Any]) -> StoredProgram:
        """Read a folder that ``write`` has made; ValueError if it is damaged, unsafe or of something else."""
        manifest = manifest_of(folder)
        if manifest.made_for != made_for:
            raise ValueError("it was made for something else")
        return cls(KeptProgram.decoded(content_of(folder, manifest, _PROGRAM)), folder, manifest)

    def load(self) -> RegionCalls:
        """Return its calls; errors of any type if that is impossible, after which nothing is left of its own folder."""
        if self._manifest is None:
            return RegionCalls(self.program, self.folder)
        try:
            for _ in checked(self.folder, self._manifest):
                pass
            calls = RegionCalls(self.program, self.folder)
        except Exception:
            remove(self.folder)
            raise
        with suppress(OSError):  # a folder of root's, in an image of a container
            os.utime(self.folder)  # it counts as just used
        return calls


def write(
    into: Path, program: KeptProgram, files: Mapping[str, Path], made_for: Mapping[str, Any], staging: Path
) -> bool:
    """Write a program, with its files by where they lie there, into a folder of its own in ``into``.

    It is written in ``staging``, on the same file system. False if it is there already; OSError if it cannot be
    written.
    """
    contents = {_PROGRAM: program.encoded()}
    target = into / f"{folder_name_of(program.name)}-{hashlib.sha256(contents[_PROGRAM]).hexdigest()[:16]}"
    if target.exists():
        return False
    contents |= {place: file.read_bytes() for place, file in files.items()}
    manifest = Manifest(made_for, 0, {name: ManifestEntry.of(content) for name, content in contents.items()})
    into.mkdir(mode=0o700, exist_ok=True)
    try:
        with unfinished(target, staging) as folder:
            for name, content in {**contents, NAME: manifest.encoded()}.items():
                for part in reversed(Path(name).parents):
                    (folder / part).mkdir(mode=0o700, exist_ok=True)
                _write_file(folder / name, content)
    except OSError:
        if target.exists():  # another process was first
            return False
        raise
    return True


def _write_file(path: Path, content: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
