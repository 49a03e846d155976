"""The manifest of a folder of artifacts: its requirements, and its files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

NAME = "manifest.json"
FORMAT = 1

MadeFor = Mapping[str, Any]
"""The requirements of compiled code, by names that a user understands; values are those of JSON."""


class ManifestEntry(NamedTuple):
    """One file; ``sha256`` is in hexadecimal digits."""

    nbytes: int
    sha256: str

    @classmethod
    def of(cls, content: bytes) -> ManifestEntry:
        return cls(len(content), hashlib.sha256(content).hexdigest())


@dataclass(frozen=True)
class Manifest:
    """The manifest of a folder of artifacts."""

    made_for: MadeFor  # the requirements, equal wherever it is read
    rows: int  # how many rows its programs have room for
    files: Mapping[str, ManifestEntry]  # all but the manifest, by their paths in the folder

    def encoded(self) -> bytes:
        files = {path: list(entry) for path, entry in self.files.items()}
        fields = {"format": FORMAT, "made_for": dict(self.made_for), "rows": self.rows, "files": files}
        return _encoded({"sha256": hashlib.sha256(_encoded(fields)).hexdigest(), "manifest": fields})

    @classmethod
    def decoded(cls, content: bytes) -> Manifest:
        """Read a file's content, each byte of which counts; ValueError if it is damaged or of another format."""
        try:
            whole = json.loads(content)
            fields = whole["manifest"]
            intact = content == _encoded(whole) and whole["sha256"] == hashlib.sha256(_encoded(fields)).hexdigest()
            if intact and fields["format"] == FORMAT:
                files = {path: ManifestEntry(*entry) for path, entry in fields["files"].items()}
                return cls(fields["made_for"], fields["rows"], files)
        except (ValueError, KeyError, TypeError, RecursionError):
            intact = False
        raise ValueError(f"has another format than this version reads, {FORMAT}" if intact else "is damaged")


def _encoded(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, indent=1).encode() + b"\n"


def differences(there: MadeFor, here: MadeFor) -> list[str]:
    """Return in words how the requirements differ between where code was written and here."""
    names = [*there, *(name for name in here if name not in there)]
    return [
        f"{name} {there.get(name, 'missing')!r} there, {here.get(name, 'missing')!r} here"
        for name in names
        if there.get(name) != here.get(name)
    ]
