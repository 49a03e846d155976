"""The log of `compiled-llm serve`, on stderr: a line of text or of JSON for each record, with its time and level."""

from __future__ import annotations

import json
import logging
from datetime import datetime, timezone
from enum import Enum

from compiled_llm.commands.printable import printable

logger = logging.getLogger("compiled_llm.server")

_PREFIX = "compiled_llm: "


class LogLevel(str, Enum):
    """Values of `--log-level`."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


class LogFormat(str, Enum):
    """Values of `--log-format`."""

    text = "text"
    json = "json"


def show_log(level: str, form: str) -> None:
    """Write the server's log to stderr: a line a request, and what happens to the server.

    Args:
        level: a value of ``LogLevel``; records below it are left out.
        form: a value of ``LogFormat``.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_Json() if form == LogFormat.json else _Text())
    lowest = logging.getLevelName(level.upper())
    for shown, least in ((logger, lowest), (logging.getLogger("uvicorn"), max(lowest, logging.WARNING))):
        shown.addHandler(handler)
        shown.setLevel(least)
        shown.propagate = False


class _Text(logging.Formatter):
    """Spells out control characters: a client may have sent them, as the id of a request through a proxy."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


class _Json(logging.Formatter):
    """An object a line; ``json.dumps`` escapes control characters."""

    def format(self, record: logging.LogRecord) -> str:
        said = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": record.getMessage().removeprefix(_PREFIX),
            **getattr(record, "request", {}),
        }
        if record.exc_info is not None:
            said["traceback"] = self.formatException(record.exc_info)
        return json.dumps(said)
