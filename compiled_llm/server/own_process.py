"""How `compiled-llm` starts processes of its own, so that they import nothing from the current folder."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_MAIN = Path(__file__).resolve().parents[1] / "__main__.py"


def own_command(*arguments: str) -> list[str]:
    """Return a command that runs `compiled-llm` with this Python and this package."""
    # With ``-m`` and ``-c`` Python looks in the current folder first, even for what it runs modules with; ``-P``, which
    # keeps it from that, is new in 3.11. The path of a script is looked up nowhere.
    return [sys.executable, str(_MAIN), *arguments]


_ON_BY_DEFAULT = {"eager_first"}  # flags that only have to be named to turn them off


def serve_arguments(model: str, options: Mapping[str, Any]) -> list[str]:
    """Return the arguments of ``compiled-llm serve`` for options by their names with underscores; None for none."""
    arguments = ["serve", model]
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if name in _ON_BY_DEFAULT:
            if value is False:
                arguments.append(f"--no-{flag.removeprefix('--')}")
        elif value is True:
            arguments.append(flag)
        elif value is not None and value is not False:
            arguments.append(f"{flag}={','.join(map(str, value)) if isinstance(value, (list, tuple)) else value}")
    return arguments
