"""Every environment variable that the project reads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Env:
    """The environment, read once and typed.

    Attributes:
        cache: ``COMPILED_LLM_CACHE``, where downloaded files are kept. Default: ``compiled_llm`` in
            ``XDG_CACHE_HOME``, or in ``~/.cache``.
        logs: ``COMPILED_LLM_LOGS``, what to log to stderr: any of ``uploads``, ``graphs`` and ``pages``, with commas
            between them. Default: nothing.
    """

    cache: Path
    logs: tuple[str, ...] = ()

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> Env:
        """Read the variables; an empty one counts as unset."""
        base = Path(environ.get("XDG_CACHE_HOME") or "~/.cache")
        cache = Path(environ.get("COMPILED_LLM_CACHE") or base / "compiled_llm")
        logs = tuple(name.strip() for name in environ.get("COMPILED_LLM_LOGS", "").split(",") if name.strip())
        return cls(cache=cache.expanduser().absolute(), logs=logs)
