"""The bytecode that Dynamo puts in a function's place, as Python if depyf can decompile it, else disassembled."""

from __future__ import annotations

import dis
import io
from types import CodeType
from typing import NamedTuple


class Readable(NamedTuple):
    """Bytecode as text.

    Attributes:
        text: Python, or the disassembled code.
        is_python: which of the two.
        note: why it is not Python; empty if it is.
    """

    text: str
    is_python: bool
    note: str = ""


def readable(code: CodeType) -> Readable:
    """Return the code as text, whatever is installed."""
    try:
        from depyf import decompile
    except ModuleNotFoundError as error:
        if error.name != "depyf":
            return _disassembled(code, _failure(error))
        return _disassembled(code, "depyf is not installed, so bytecode is shown as such: pip install depyf")
    except Exception as error:  # depyf reaches into torch, and knows the versions of its day
        return _disassembled(code, _failure(error))
    try:
        return Readable(decompile(code), True)
    except Exception as error:  # the same
        return _disassembled(code, _failure(error))


def _failure(error: Exception) -> str:
    from importlib.metadata import version

    said = str(error).strip().partition("\n")[0]
    return (
        f"depyf {version('depyf')} does not know this Python or torch ({type(error).__name__}: {said}), so bytecode is "
        "shown as such"
    )


def _disassembled(code: CodeType, note: str) -> Readable:
    text = io.StringIO()
    dis.dis(code, file=text)
    return Readable(f"# {note}\n\n{text.getvalue()}", False, note)
