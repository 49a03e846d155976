"""The `compiled-llm` command."""

from __future__ import annotations

import sys


def main() -> None:
    """Run `compiled-llm`, or say what to install for it."""
    try:
        from compiled_llm.commands.app import app
    except ModuleNotFoundError as error:
        if error.name != "typer":
            raise
        print("error: this command needs typer: pip install 'compiled-llm[demo]'", file=sys.stderr)  # noqa: T201
        sys.exit(2)
    app()


if __name__ == "__main__":
    main()
