"""Text from models and files, so that a terminal shows it and does not obey it."""

from __future__ import annotations

import re

# Everything below the space but tab and newline, DEL, and the same again with the eighth bit.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Return the text with control characters, with which terminal sequences begin, spelled out in hexadecimal."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)
