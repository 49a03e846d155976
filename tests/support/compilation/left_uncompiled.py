"""Programs that are not compiled: tests of what is made of one program need no trace of the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from compiled_llm.compilation.program import Program
from compiled_llm.compilation.programs import Programs


def leave_uncompiled(patch: pytest.MonkeyPatch, *names: str) -> None:
    """Let the programs of these names run as Python, in models that are wrapped from now on."""
    compile_any = Programs.compile

    def compile(programs: Programs, program: Program, *more: Any) -> Callable[..., Any]:
        left = program.name in names
        return programs._functions[program.name] if left else compile_any(programs, program, *more)

    patch.setattr(Programs, "compile", compile)
