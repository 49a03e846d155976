"""A folder of another user whose files are called like modules: each leaves a note if it is imported."""

from __future__ import annotations

import sys
from pathlib import Path

NOTE = """import os, sys
with open(os.path.join({folder!r}, "executed"), "a") as note:
    print(__file__, sys.argv, file=note)
"""


class ForeignFolder:
    """Has a file for each of some modules."""

    def __init__(self, path: Path, modules: set[str]) -> None:
        self.path = path
        path.mkdir()
        for name in modules - {"__main__"}:
            (path / f"{name}.py").write_text(NOTE.format(folder=str(path)))

    def executed(self) -> str:
        """Which of the files were executed, by what; asked again, those since."""
        note = self.path / "executed"
        lines = note.read_text() if note.exists() else ""
        note.unlink(missing_ok=True)
        return lines


STANDARD = {*sys.stdlib_module_names, "sitecustomize", "usercustomize"}
OURS = {"compiled_llm", "compiled_llm_flashinfer", "compiled_llm_ops"}


def imported() -> set[str]:
    """Whatever this process has imported, and what other processes are started with."""
    return {name.partition(".")[0] for name in sys.modules} | {"pip", "setuptools"}
