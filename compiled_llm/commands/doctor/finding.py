"""One thing that `compiled-llm doctor` has looked at."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple

Status = Literal["ok", "warning", "missing", "optional", "failed", "not needed"]


class Outcome(NamedTuple):
    """The result of one check: version, path, size or what is wrong, and how to get it or what to do."""

    status: Status
    detail: str
    fix: str = ""


@dataclass(frozen=True)
class DoctorFinding:
    """One thing that was looked at.

    Attributes:
        part: the heading it belongs under.
        needed: nothing can run here without it.
    """

    part: str
    name: str
    status: Status
    detail: str
    fix: str = ""
    needed: bool = False
    seconds: float | None = None

    @property
    def prevents(self) -> bool:
        return self.needed and self.status in ("missing", "failed")


def essence(error: BaseException) -> str:
    """Return an error in one line: its first line, and the next one that mentions an error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    cause = next((line for line in lines[1:] if re.search(r"\b(error|fatal)\b", line, re.IGNORECASE)), None)
    text = lines[0] if cause is None else f"{lines[0].rstrip(':')}: {cause}"
    return text if len(text) <= 300 else text[:297] + "..."
