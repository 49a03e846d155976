"""Kernels for CPUs are built once, also for tests whose caches are their own: each takes more than a second."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from torch._inductor import cpp_builder


def build_libraries_once(patch: pytest.MonkeyPatch, cache: Path) -> None:
    """Let all caches of Inductor's take libraries from this one, and fill it: a name is a hash of source and flags."""
    if not hasattr(cpp_builder, "_run_compile_cmd"):
        return
    run = cpp_builder._run_compile_cmd

    def run_or_copy(command: str, cwd: str) -> None:
        words = shlex.split(command)
        target = Path(cwd, words[words.index("-o") + 1]) if "-o" in words[:-1] else Path()
        known = cache / target.name[1:3] / target.name
        if target.suffix == ".so" and known.exists():
            shutil.copy(known, target)
            return
        run(command, cwd)
        if target.suffix == ".so" and not known.exists():
            known.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(dir=cache) as own:
                Path(shutil.copy(target, own)).replace(known)

    patch.setattr(cpp_builder, "_run_compile_cmd", run_or_copy)
