"""The artifacts that one wrapped model starts with."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import fx

from compiled_llm.compat.torch.inductor import (
    cannot_compile,
    compile_with_inductor,
    inductor_cache_at,
    try_vector_instructions_early,
    without_precompiled_headers,
)
from compiled_llm.compat.torch.triton import find_kernels_in, forget_kernels_in, has_triton, kernels_built
from compiled_llm.compilation.artifacts import stand_in_compiler
from compiled_llm.compilation.artifacts.checked_folder import RefusedError, copy, manifest_of
from compiled_llm.compilation.artifacts.manifest import MadeFor, Manifest, differences
from compiled_llm.compilation.artifacts.profile import Profile
from compiled_llm.compilation.artifacts.writing import PLACE, PROFILE
from compiled_llm_ops.protocol import Installation


class NotInArtifactsError(RuntimeError):
    """A graph would have to be compiled although the model was wrapped with artifacts."""

    def __init__(self, source: Path, what: str, program: str = "", ahead: str = "") -> None:
        """Say ``what`` the folder lacks, of which program, and the options ``ahead`` that have it written."""
        self._source = source
        self._what = what
        option = f" {ahead}" if ahead else ""
        why = f"They may have been written without{option}, or the" if ahead else "The"
        super().__init__(
            f"artifacts={str(source)!r}: {what}{program and f', of {program!r}'}. {why} model has changed since they "
            f"were written, or torch's settings are others; write them again with `compiled-llm compile{option}`, or "
            "wrap without artifacts"
        )

    def of_program(self, name: str, ahead: str) -> NotInArtifactsError:
        """Return the error with the program's name, and what ``compile`` is given to have it there."""
        return NotInArtifactsError(self._source, self._what, name, ahead)


class Artifacts:
    """Compiled code in a folder of this process alone."""

    def __init__(self, source: Path, manifest: Manifest, folder: Path, installation: Installation) -> None:
        """``folder`` is a checked copy, removed with this object."""
        self.source = source
        self.rows = manifest.rows  # how many rows the programs have room for
        # which steps to prepare; None if none was given when they were written
        self.profile = Profile.read(folder / PROFILE) if PROFILE in manifest.files else None
        self.folder = folder  # of this process alone
        self._variables = stand_in_compiler.variables(folder)
        self._libraries_at_first = self._libraries = _libraries(folder)
        self._installation = installation
        self._compiled = 0
        self._built_before = len(kernels_built()), installation.kernels_built()
        weakref.finalize(self, _remove, folder, os.getpid())

    @classmethod
    def read(cls, source: str | os.PathLike[str], here: MadeFor, installation: Installation) -> Artifacts:
        """Check a folder against the requirements ``here``, and copy it; ValueError if it is unsafe or unfit."""
        path = _absolute(source)
        with _naming(path):
            manifest = manifest_of(path)
            if different := differences(manifest.made_for, here):
                raise RefusedError(f"was made for something else: {'; '.join(different)}")
            folder = Path(tempfile.mkdtemp(prefix="compiled_llm_artifacts_"))
            try:
                copy(path, manifest, folder)
                _say_where(folder)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
        if (folder / "triton").is_dir() and has_triton():
            find_kernels_in(folder / "triton")
        if (folder / "flashinfer").is_dir():
            installation.find_kernels_in(folder / "flashinfer")
        return cls(path, manifest, folder, installation)

    def begin(self, device: str) -> None:
        """Begin, on a thread, slow work that the first graph needs."""
        if device == "cpu":
            try_vector_instructions_early(self.folder, self._variables)

    def compile(self, module: fx.GraphModule, inputs: Sequence[Any], options: Mapping[str, Any]) -> Callable[..., Any]:
        """Return Inductor's code for a graph; NotInArtifactsError if it would have to be compiled now."""
        with inductor_cache_at(self.folder, self._variables), without_precompiled_headers():
            try:
                compiled = compile_with_inductor(module, inputs, {**options, **_NO_PROCESSES})
            except Exception as error:
                if not cannot_compile(error):
                    raise
                raise self.missing("a C++ kernel had to be built") from None
        if built := _libraries(self.folder) - self._libraries:
            self._libraries |= built
            raise self.missing("a C++ kernel had to be built")
        return compiled

    def refuse(self) -> None:
        """Raise NotInArtifactsError, since a graph is about to be compiled."""
        self._compiled += 1
        raise self.missing("a graph is not among them")

    def missing(self, what: str) -> NotInArtifactsError:
        return NotInArtifactsError(self.source, what)

    def check_rows(self, rows: int) -> None:
        """Raise ValueError if there is no room for so many rows."""
        if rows > self.rows:
            raise ValueError(
                f"artifacts={str(self.source)!r} have room for {self.rows} rows, and {rows} are asked for: lower "
                f"max_num_seqs or max_batch_size, or write them with `compiled-llm compile --max-num-seqs {rows}`"
            )

    def builds(self) -> dict[str, int]:
        """Return how many of each kind had to be built although they belong here: 0 of each, if all is well."""
        triton, attention = self._built_before
        return {
            "graphs": self._compiled,
            "C++ kernels": len(self._libraries - self._libraries_at_first),
            "Triton kernels": len(kernels_built()) - triton,
            "FlashInfer kernels": self._installation.kernels_built() - attention,
        }


def rows_in(source: str | os.PathLike[str]) -> int:
    """Return how many rows the programs of a folder have room for; ValueError if it is unsafe, or not of artifacts."""
    path = _absolute(source)
    with _naming(path):
        return manifest_of(path).rows


def _absolute(source: str | os.PathLike[str]) -> Path:
    return Path(os.path.abspath(os.path.expanduser(source)))


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Have the error that refuses a folder say which, and what to do."""
    try:
        yield
    except RefusedError as error:
        raise ValueError(f"artifacts={str(path)!r} {error}; write it again with `compiled-llm compile`") from None


_NO_PROCESSES = {"compile_threads": 1}
"""Inductor starts processes as it loads kernels that need Triton; all import torch, to build what is there already."""


def _libraries(folder: Path) -> frozenset[Path]:
    return frozenset((folder / "inductor").rglob("*.so"))


def _say_where(folder: Path) -> None:
    """Write the folder's own path into Triton's lists of files."""
    for path in (folder / "triton").rglob("*.json"):
        path.write_bytes(path.read_bytes().replace(PLACE, str(folder).encode()))


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:  # a forked one ends before the one that reads it
        forget_kernels_in(folder / "triton")
        shutil.rmtree(folder, ignore_errors=True)
