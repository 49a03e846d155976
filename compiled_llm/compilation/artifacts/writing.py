"""Writes artifacts: compilers fill a new folder, which is sealed with a manifest, then renamed."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from compiled_llm.compat.torch.inductor import cache_variables
from compiled_llm.compilation.artifacts.manifest import NAME, MadeFor, Manifest, ManifestEntry

PLACE = b"[folder of compiled_llm's artifacts]"
"""Stands in Triton's lists of files for the folder that they lie in, wherever that is."""

UNFINISHED = ".unfinished-"
"""Names of folders begin so while they are written."""

PROFILE = "profile.json"  # which steps processes that start with the folder prepare

_FLASHINFER = "flashinfer_workspace"
_NOT_CODE = {"locks"}


def variables(folder: Path) -> dict[str, str]:
    """Return the environment in which a process keeps all its builds in a folder."""
    return {**cache_variables(folder), "FLASHINFER_WORKSPACE_BASE": str(folder / _FLASHINFER)}


def check_new(target: Path) -> None:
    """Raise ValueError if ``target`` exists already and is not empty, or has no parent folder."""
    if target.is_symlink() or (target.exists() and not _is_empty(target)):
        raise ValueError(f"-o {target}: that exists already; give a new folder")
    if not target.parent.is_dir():
        raise ValueError(f"-o {target}: there is no folder {target.parent}; make it first")


@contextmanager
def unfinished(target: Path, staging: Path | None = None) -> Iterator[Path]:
    """Yield a new folder, which takes the place of ``target`` if the block has written a manifest; else it is removed.

    It lies in ``staging``, next to ``target`` unless given.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"{UNFINISHED}{target.name}-", dir=staging or target.parent))
    try:
        yield folder
        if (folder / NAME).exists():
            os.rename(folder, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def seal(folder: Path, made_for: MadeFor, rows: int) -> Manifest:
    """Keep the builds that later processes need, and write the manifest, last of all."""
    _take_kernels_of_flashinfer(folder)
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir():
            if path.name in _NOT_CODE:
                shutil.rmtree(path)
            continue
        if path.suffix == ".json" and path.is_relative_to(folder / "triton"):
            path.write_bytes(path.read_bytes().replace(str(folder).encode(), PLACE))
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)  # root may write it for others
    files = {path.relative_to(folder).as_posix(): ManifestEntry.of(path.read_bytes()) for path in _files(folder)}
    manifest = Manifest(made_for, rows, files)
    (folder / NAME).write_bytes(manifest.encoded())
    (folder / NAME).chmod(0o644)
    _sync(folder)
    return manifest


def _take_kernels_of_flashinfer(folder: Path) -> None:
    """Move ``NAME/NAME.so`` from FlashInfer's cache to where it looks for prebuilt kernels."""
    workspace = folder / _FLASHINFER
    for library in sorted(workspace.rglob("cached_ops/*/*.so")):
        if library.stem == library.parent.name:
            target = folder / "flashinfer" / library.stem / library.name
            target.parent.mkdir(parents=True)
            library.rename(target)
    shutil.rmtree(workspace, ignore_errors=True)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and not any(folder.iterdir())


def _sync(folder: Path) -> None:
    """Flush all of it to the disk before it gets its name: after a crash there must not be half of it."""
    for path in _files(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())
