"""Started by its path, as the worker process that compiles grammars: see ``worker``."""

# Python runs it isolated (``-I``), which leaves out the current folder, and this file's own; modules come from where
# the process that has started it has them from, by the arguments. The first one says how xgrammar is imported:
# ``alone``, without torch, or ``whole``.

from __future__ import annotations

import os
import sys


def main() -> None:
    """Work until the engine's process has gone."""
    how, *sys.path[:] = sys.argv[1:]
    if how == "alone":
        from compiled_llm.compat.xgrammar import import_compiler

        try:
            import_compiler()
        except Exception:
            os.execv(sys.executable, [sys.executable, "-I", __file__, "whole", *sys.path])
    from compiled_llm.engine.grammars.worker import Worker

    Worker().run()


if __name__ == "__main__":
    main()
