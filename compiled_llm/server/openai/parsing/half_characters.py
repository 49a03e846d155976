"""Halves of UTF-16 characters, which JSON can spell as escapes, and no text can hold."""

from __future__ import annotations

import json


def escaped(text: str) -> str:
    """Return JSON with halves of characters as escapes, which mean them in its strings."""
    return text.encode("utf-8", "backslashreplace").decode()


def written(value: object) -> str:
    return escaped(json.dumps(value, ensure_ascii=False))


def replaced(text: str) -> str:
    """Return a text with U+FFFD for each half of a character."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def replaced_in(value: object) -> object:
    """Return a value of JSON with U+FFFD for each half of a character."""
    text = json.dumps(value, ensure_ascii=False)
    return value if (whole := replaced(text)) == text else json.loads(whole)
