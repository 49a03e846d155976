"""Text from models and files, so that a terminal shows it and does not obey it."""

from __future__ import annotations

import re

# Everything below the space but tab and newline, DEL, and the same again with the eighth bit; then what turns the
# direction of the text after it, which would stand there in another order than it is read by programs.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]|[\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Return the text with control characters, with which terminal sequences begin, and bidi overrides spelled out."""
    return _CONTROL.sub(lambda match: _spelled(ord(match[0])), text)


def _spelled(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
