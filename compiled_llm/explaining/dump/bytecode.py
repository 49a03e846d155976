"""The bytecode that Dynamo puts in a function's place, as Python if depyf can decompile it, else disassembled."""

from __future__ import annotations

import dis
import io
from importlib.metadata import version
from types import CodeType


def readable(code: CodeType) -> tuple[str, str]:
    """Return the code as Python and an empty note, or disassembled and a note that says why."""
    try:
        from depyf import decompile

        return decompile(code), ""
    except Exception as error:  # depyf reaches into torch, and knows the versions of its day
        note = _why_not(error)
    text = io.StringIO()
    dis.dis(code, file=text)
    return f"# {note}\n\n{text.getvalue()}", note


def _why_not(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name == "depyf":
        return "depyf is not installed, so bytecode is shown as such: pip install depyf"
    said = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return f"depyf {version('depyf')} does not know this Python or torch ({said}), so bytecode is shown as such"
