"""The `compiled-llm` command."""

from __future__ import annotations

import atexit
import gc
import os
import sys


def main() -> None:
    """Run `compiled-llm`, or say what to install for it."""
    # Registered first, it runs last. Python would look for cycles once more in all that torch has compiled, for two
    # seconds, only to free memory that ends with the process.
    atexit.register(gc.freeze)
    # By default Python looks for cycles whenever 700 objects are new, and now and then in all there are. Imports and
    # traces make millions that stay: that is a tenth of a start.
    gc.set_threshold(10_000)
    try:
        from compiled_llm.commands.app import app
    except ModuleNotFoundError as error:
        if error.name != "typer":
            raise
        print("error: this command needs typer: pip install '.[demo]' in the checkout", file=sys.stderr)  # noqa: T201
        sys.exit(2)
    app()


def _leave_out_current_folder() -> None:
    """Import nothing more from the current folder, where `python -m` looks first; `compiled-llm` never does."""
    if sys.path[0] in ("", os.getcwd()):
        del sys.path[0]


if __name__ == "__main__":
    _leave_out_current_folder()
    main()
