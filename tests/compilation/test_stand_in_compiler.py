"""The stand-in for the C++ compiler of artifacts prints the version of that one, and compiles nothing."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from compiled_llm.compat.torch.inductor import cpp_compiler
from compiled_llm.compilation.artifacts import stand_in_compiler


def answers(*arguments: str, path: str | None = None) -> tuple[int, str]:
    """Whether a compiler was content, and what it said, with the programs of one folder alone if ``path`` names it."""
    environment = {**os.environ, "LC_ALL": "C", **({} if path is None else {"PATH": path})}
    done = subprocess.run([cpp_compiler(), *arguments], env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_it_answers_as_the_compiler_does_where_no_program_is_found(tmp_path: Path) -> None:
    stand_in_compiler.write_to(tmp_path)
    programs = str(tmp_path / "compiler")
    assert stand_in_compiler.variables(tmp_path)["PATH"].split(os.pathsep)[0] == programs
    for question in ("--version", "-v"):
        assert answers(question, path=programs) == answers(question)
    source = tmp_path / "empty.cpp"
    source.touch()
    status, said = answers("-c", str(source), "-o", str(tmp_path / "empty.o"), path=programs)
    assert status == 1
    assert "compiles nothing" in said


def test_a_compiler_that_is_called_by_its_path_is_found_by_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stand_in_compiler, "cpp_compiler", lambda: "/usr/bin/g++-12")
    stand_in_compiler.write_to(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert stand_in_compiler.variables(tmp_path) == {}
