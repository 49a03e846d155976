"""The notebook of the documentation: its code, and what it prints.

`PYTHONPATH=. python support/docs/notebook.py`, in tests/, runs it on the CPU and writes what it prints into the file.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from support.docs.pages import DOCS

NOTEBOOK = DOCS / "how-to" / "notebook.ipynb"
SECONDS = 600
MODE = re.compile(r"mode='[\w-]+'")


def kept() -> Any:
    """The notebook as it lies there."""
    return json.loads(NOTEBOOK.read_text())


def code() -> list[str]:
    """The source of each cell of code."""
    return ["".join(cell["source"]) for cell in _cells(kept())]


def executed(folder: Path, old: str = "", new: str = "") -> Any:
    """Return the notebook as a kernel of its own has run it in `folder`, with `new` for `old` in its code."""
    import nbclient
    import nbformat

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in _cells(notebook):
        cell.source = cell.source.replace(old, new) if old else cell.source
    options = {"timeout": SECONDS, "coalesce_streams": True, "resources": {"metadata": {"path": str(folder)}}}
    client = nbclient.NotebookClient(notebook, **options)
    client.execute(env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    return notebook


def figures_left_out(notebook: Any) -> list[list[str]]:
    """What each cell prints, but for what is measured, and what depends on the mode."""
    texts = [MODE.sub("", _printed(cell)) for cell in _cells(notebook)]
    lines = [[line for line in text.splitlines() if not line.startswith(("compiled", "pages"))] for text in texts]
    return [[re.sub(r"[\d,]+\.\d+", "0.0", line) for line in cell] for cell in lines]


def _cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def _printed(cell: Any) -> str:
    return "".join("".join(output["text"]) for output in cell["outputs"] if output.get("name") == "stdout")


def write() -> None:
    """Run it, and keep what it prints; stderr has progress and warnings."""
    import nbformat

    notebook = executed(NOTEBOOK.parent)
    for cell in _cells(notebook):
        cell["outputs"] = [output for output in cell["outputs"] if output.get("name") == "stdout"]
        cell["metadata"] = {}
    notebook["metadata"] = kept()["metadata"]
    nbformat.write(notebook, NOTEBOOK)


if __name__ == "__main__":
    write()
