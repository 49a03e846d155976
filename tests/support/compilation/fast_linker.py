"""Inductor's kernels for CPUs are linked against all of torch: most of a small one's time, with the usual linker."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch


def link_fast() -> Callable[[], None]:
    """Let compilers that this process and its children start link with gold, if it is here; return what ends that.

    By the compiler's own variable: flags would be part of the keys in Inductor's cache.
    """
    gold = shutil.which("ld.gold")
    if gold is None or "COMPILER_PATH" in os.environ or torch.cuda.is_available():
        return lambda: None
    folder = tempfile.TemporaryDirectory(prefix="compiled_llm_linker_")
    (Path(folder.name) / "ld").symlink_to(gold)
    os.environ["COMPILER_PATH"] = folder.name

    def end() -> None:
        os.environ.pop("COMPILER_PATH", None)
        folder.cleanup()

    return end
