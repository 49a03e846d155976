"""Every environment variable that the library reads, and the logging that one of them turns on."""

# Without it, everything goes through Python's `logging` as usual.

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

LOGS = ("uploads", "graphs", "pages")
"""The names in ``COMPILED_LLM_LOGS``, of the loggers ``compiled_llm.uploads``, ``.graphs`` and ``.pages``."""


@dataclass(frozen=True)
class Env:
    """The environment, read once and typed.

    Attributes:
        cache: ``COMPILED_LLM_CACHE``, where downloaded files and compiled programs are kept. Default: ``compiled_llm``
            in ``XDG_CACHE_HOME`` if that is an absolute path, else in ``~/.cache``.
        keeps_programs: ``COMPILED_LLM_KEEP_PROGRAMS``, with ``0``, programs are neither kept for later processes nor
            taken as earlier ones have kept them, but for those in artifacts. Default: ``1``.
        logs: ``COMPILED_LLM_LOGS``, what to log to stderr: any of ``uploads``, ``graphs`` and ``pages``, with commas
            between them. Default: nothing.
    """

    cache: Path
    keeps_programs: bool = True
    logs: tuple[str, ...] = ()

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> Env:
        """Read the variables; an empty one counts as unset. No value is an error: `import compiled_llm` reads them."""
        base = environ.get("XDG_CACHE_HOME", "")
        if not os.path.isabs(base):  # which the variable's own specification ignores: it would depend on the folder
            base = os.path.join("~", ".cache")
        cache = environ.get("COMPILED_LLM_CACHE") or os.path.join(base, "compiled_llm")
        logs = tuple(name.strip() for name in environ.get("COMPILED_LLM_LOGS", "").split(",") if name.strip())
        # Path.expanduser raises if there is no home.
        keeps = environ.get("COMPILED_LLM_KEEP_PROGRAMS") != "0"
        return cls(cache=Path(os.path.expanduser(cache)), keeps_programs=keeps, logs=logs)


@contextmanager
def replaced(values: Mapping[str, str]) -> Iterator[None]:
    """Give some variables of this process other values for the block, and restore them after it."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def enable_logs(names: Iterable[str]) -> None:
    """Write the records of the named loggers to stderr; warn of a name that is no logger's."""
    for name in names:
        if name not in LOGS:
            logging.getLogger("compiled_llm").warning("COMPILED_LLM_LOGS: %r is none of %s", name, ", ".join(LOGS))
            continue
        logger = logging.getLogger(f"compiled_llm.{name}")
        logger.setLevel(logging.DEBUG)
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False  # or a handler of the application's would say it again
