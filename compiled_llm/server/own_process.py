"""How `compiled-llm` starts processes of its own, so that they import nothing from the current folder."""

from __future__ import annotations

import sys
from pathlib import Path

_MAIN = Path(__file__).resolve().parents[1] / "__main__.py"


def own_command(*arguments: str) -> list[str]:
    """Return a command that runs `compiled-llm` with this Python and this package.

    With ``-m`` and ``-c`` Python looks in the current folder first, even for what it runs modules with; ``-P``, which
    keeps it from that, is new in 3.11. The path of a script is looked up nowhere.
    """
    return [sys.executable, str(_MAIN), *arguments]
