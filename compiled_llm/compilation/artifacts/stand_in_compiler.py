"""A stand-in for the C++ compiler while kernels are looked up: nothing is compiled, so none need be installed."""

# Inductor asks the compiler for its version before it looks for a kernel, as part of the key, and tries whether there
# is one at all.

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

from compiled_llm.compat.torch.inductor import cpp_compiler

_FOLDER = "compiler"
_QUESTIONS = ("--version", "-v")


def write_to(folder: Path) -> None:
    """Write a program of the compiler's name, which prints the same version as the compiler here."""
    # A compiler that is called by its path is found by that, and needs to be there when kernels are looked for.
    name = cpp_compiler()
    if os.sep in name:
        return
    answers = "\n".join(f"{question}) printf '%s' {shlex.quote(_answer(name, question))} ;;" for question in _QUESTIONS)
    why = f"{name}: this one stands for the compiler that has built these artifacts, and compiles nothing"
    script = f'#!/bin/sh\ncase "$1" in\n{answers}\n*) echo {shlex.quote(why)} >&2; exit 1 ;;\nesac\n'
    (folder / _FOLDER).mkdir()
    (folder / _FOLDER / name).write_text(script)


def variables(folder: Path) -> dict[str, str]:
    """Return the environment in which the stand-in is found first; empty if there is no stand-in."""
    programs = folder / _FOLDER
    if not programs.is_dir():
        return {}
    for path in programs.iterdir():
        path.chmod(0o700)
    return {"PATH": os.pathsep.join([str(programs), *filter(None, [os.environ.get("PATH")])])}


def _answer(name: str, question: str) -> str:
    environment = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run([name, question], env=environment, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr
