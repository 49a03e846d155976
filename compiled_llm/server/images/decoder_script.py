"""Started by its path, as the worker process that decodes images: see ``decoder``."""

# Python runs it isolated (``-I``), which leaves out the current folder, and this file's own; modules come from where
# the process that has started it has them from, by the arguments.

from __future__ import annotations

import sys


def main() -> None:
    """Work until the engine process has gone."""
    sys.path[:] = sys.argv[1:]
    from compiled_llm.server.images.decoder import Decoder

    Decoder().run()


if __name__ == "__main__":
    main()
