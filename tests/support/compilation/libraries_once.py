"""Kernels for CPUs are built once, also for tests whose caches are their own: each takes more than a second."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from torch._inductor import cpp_builder


def build_libraries_once(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Keep libraries in a folder too, from where each other cache takes them: a name is a hash of source and flags."""
    if not hasattr(cpp_builder, "_run_compile_cmd"):
        return
    run = cpp_builder._run_compile_cmd

    def run_or_copy(command: str, cwd: str) -> None:
        words = shlex.split(command)
        target = Path(cwd, words[words.index("-o") + 1]) if "-o" in words[:-1] else Path()
        known = folder / target.name
        if target.suffix == ".so" and known.exists():
            shutil.copy(known, target)
            return
        run(command, cwd)
        if target.suffix == ".so":
            folder.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(dir=folder) as own:  # other workers find none that is half written
                Path(shutil.copy(target, own)).replace(known)

    patch.setattr(cpp_builder, "_run_compile_cmd", run_or_copy)
