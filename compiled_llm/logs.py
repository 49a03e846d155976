"""Logging that an environment variable turns on; without it, everything goes through Python's `logging` as usual."""

from __future__ import annotations

import logging
from collections.abc import Iterable

NAMES = ("uploads", "graphs", "pages")
"""What ``COMPILED_LLM_LOGS`` can name: the loggers ``compiled_llm.uploads``, ``.graphs`` and ``.pages``."""


def enable(names: Iterable[str]) -> None:
    """Write all that the named loggers say to stderr.

    Raises:
        ValueError: there is no such logger.
    """
    for name in names:
        if name not in NAMES:
            raise ValueError(f"COMPILED_LLM_LOGS: {name!r} is none of {', '.join(NAMES)}")
        logger = logging.getLogger(f"compiled_llm.{name}")
        logger.setLevel(logging.DEBUG)
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False  # or a handler of the application's would say it again
