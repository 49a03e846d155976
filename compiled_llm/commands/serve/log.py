"""The log of `compiled-llm serve`, on stderr: a line of text or of JSON for each record, with its time and level."""

from __future__ import annotations

import json
import logging
import sys
import threading
from datetime import datetime, timezone
from enum import Enum
from io import TextIOBase
from typing import TextIO

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
    """Write the server's log to stderr: a line a request, what happens to the server, warnings of other packages."""
    if form == LogFormat.json:
        write_json_lines()
    handler = logging.StreamHandler(sys.stderr.stream if isinstance(sys.stderr, _JsonLines) else sys.stderr)
    handler.setFormatter(_Json() if form == LogFormat.json else _Text())
    lowest = logging.getLevelName(level.upper())
    of_others = max(lowest, logging.WARNING)
    for shown, least in ((logger, lowest), (logging.getLogger("uvicorn"), of_others), (logging.root, of_others)):
        shown.addHandler(handler)
        shown.setLevel(least)
        shown.propagate = False


def write_json_lines() -> None:
    """Have each line that this process writes to stderr be an object, as those of the log, whatever writes it."""
    if not isinstance(sys.stderr, _JsonLines):
        sys.stderr = _JsonLines(sys.stderr)


class _JsonLines(TextIOBase):
    """Stderr whose lines become records: those of other packages' own handlers, and of Python, are none."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self._begun = ""  # of a line
        self._writing = threading.Lock()

    def write(self, text: str) -> int:
        with self._writing:
            *lines, self._begun = (self._begun + text).split("\n")
            for line in filter(str.strip, lines):
                self.stream.write(_json(_now(), _level(line), line.removeprefix(_PREFIX)) + "\n")
        return len(text)

    def flush(self) -> None:
        self.stream.flush()

    def fileno(self) -> int:
        return self.stream.fileno()

    def writable(self) -> bool:
        return True


def _level(line: str) -> str:
    if line.startswith("error: "):
        return "error"
    return "info" if line.startswith(_PREFIX) else "warning"


class _Text(logging.Formatter):
    """A formatter that spells out control characters: clients may have sent them, as a request's id through a proxy."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


class _Json(logging.Formatter):
    """An object a line."""

    def format(self, record: logging.LogRecord) -> str:
        more = dict(getattr(record, "request", {}))
        if record.exc_info is not None:
            more["traceback"] = self.formatException(record.exc_info)
        level = record.levelname.lower()
        message = record.getMessage().removeprefix(_PREFIX)
        return _json(datetime.fromtimestamp(record.created, timezone.utc), level, message, **more)


def _json(time: datetime, level: str, message: str, **more: object) -> str:
    """Return a record as it is written; ``json.dumps`` escapes control characters."""
    return json.dumps({"time": time.isoformat(timespec="milliseconds"), "level": level, "message": message, **more})


def _now() -> datetime:
    return datetime.now(timezone.utc)
