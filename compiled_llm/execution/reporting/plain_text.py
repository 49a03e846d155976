"""Drawings of rich as text."""

from __future__ import annotations

import io

from rich.console import Console, RenderableType


def plain_text(shown: RenderableType) -> str:
    """Return a drawing 100 columns wide, without colours."""
    # In a notebook a console shows what it is given below the cell, wherever it writes; there it would stand twice.
    console = Console(width=100, file=io.StringIO(), record=True, force_jupyter=False)
    console.print(shown)
    return "\n".join(line.rstrip() for line in console.export_text().splitlines())
