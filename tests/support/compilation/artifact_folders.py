"""Folders of artifacts, as `compiled-llm compile` writes them: made up ones, and real ones, by a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from compiled_llm.compilation.artifacts.artifacts import Artifacts
from compiled_llm.compilation.artifacts.writing import seal, unfinished
from compiled_llm_ops.backends import backend_named

HERE: dict[str, Any] = {"torch": "2.13.0", "dtype": "torch.float32", "config.hidden_size": 64, "option mode": "compile"}
ROWS = 8
FILES = {
    "inductor/aa/code.py": b"raise SystemExit('this was run')\n",
    "inductor/fxgraph/bb/key/entry": bytes(range(256)) * 40,
    "triton/KEY/__grp__kernel.json": b'{"child_paths": {"kernel.cubin": "@/triton/KEY/kernel.cubin"}}',
    "triton/KEY/kernel.cubin": b"\x7fELF" * 100,
}


def made_up(target: Path) -> Path:
    """A folder whose files are no code at all."""
    with unfinished(target) as folder:
        for name, content in FILES.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content.replace(b"@", str(folder).encode()))
        seal(folder, HERE, ROWS)
    return target


def read(folder: Path, **changes: Any) -> Artifacts:
    """Read a made-up folder, where some things are other than where it was written."""
    return Artifacts.read(folder, {**HERE, **changes}, backend_named("reference").installation)


def compiled(model: Path, target: Path, *options: str, threads: int = 1) -> subprocess.CompletedProcess[str]:
    """Run `compiled-llm compile` for a model's folder."""
    command = [sys.executable, "-m", "compiled_llm", "compile", str(model), "-o", str(target), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
