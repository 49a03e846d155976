"""Kept programs of one model: recorded where artifacts are written, taken where they are read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path as File

from compiled_llm.compilation.kept.kept_program import KeptProgram
from compiled_llm.compilation.kept.record import Recorder
from compiled_llm.compilation.kept.take import Taker
from compiled_llm.model.version.model_version import ModelVersion

FOLDER = "kept"

_written: list[File] = []
"""The folder of artifacts that this process writes; none if it writes none."""


@contextmanager
def recording(folder: File) -> Iterator[None]:
    """Write down the programs that are traced while the block runs, of models wrapped there, for a folder of artifacts.

    This process keeps all its builds in that folder, as ``artifacts.writing.variables`` says.
    """
    _written.append(folder)
    try:
        yield
    finally:
        _written.remove(folder)


def not_kept(folder: File) -> dict[str, str]:
    """Return why programs in a folder of artifacts are not kept, by their names."""
    refused = {}
    for program in _read(folder):
        if program.refused is not None:
            refused[program.name] = program.refused
    return refused


def recorder(version: ModelVersion) -> Recorder | None:
    """Return what writes programs down, if this process writes artifacts."""
    return Recorder(_written[-1] / FOLDER, version) if _written else None


def taker(folder: File, version: ModelVersion) -> Taker:
    """Return what takes the programs that are kept in a checked folder of artifacts."""
    return Taker(folder, _read(folder), version)


def _read(folder: File) -> list[KeptProgram]:
    """Read the programs of a folder; one that this version does not understand is none."""
    found = []
    for path in sorted((folder / FOLDER).glob("*.json")):
        try:
            found.append(KeptProgram.decoded(path.read_bytes()))
        except ValueError:
            continue
    return found
