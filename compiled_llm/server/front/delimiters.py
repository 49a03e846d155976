"""What the parts of an answer begin and end with, and which text is clear of it, so that no parser needs to see it."""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Mapping
from typing import Any

import regex  # type: ignore[import-untyped]  # transformers' parser uses it; it finds matches that only begin

_LETTERS = "aé漢"
"""Whatever begins with one of these may begin with anything."""


class Delimiters:
    """Those of a response template."""

    def __init__(self, fields: Mapping[str, Mapping[str, Any]]) -> None:
        """Find which characters they can begin with.

        Args:
            fields: of the response template.
        """
        patterns = list(_patterns(fields))
        self._are_known = not any(_looks_around(pattern) or _begins(pattern, _LETTERS) for pattern in patterns)
        possible = {*string.printable, *(character for pattern in patterns for character in pattern.pattern)}
        starts = {character for character in possible if any(_begins(pattern, character) for pattern in patterns)}
        soft = {
            start for start in starts if start.isspace() and not any(_goes_on(pattern, start) for pattern in patterns)
        }
        hard = "".join(map(re.escape, sorted(starts - soft)))
        self._hard = re.compile(f"[{hard}]" if hard else r"(?!)")
        self._soft = tuple(soft)

    def are_far_from(self, text: str) -> bool:
        """Whether no delimiter stands in a text, and none begins at its end."""
        return self._are_known and self._hard.search(text) is None and not text.endswith(self._soft)


def _patterns(fields: Mapping[str, Mapping[str, Any]]) -> Iterator[Any]:
    for field in fields.values():
        for name in ("open", "close"):
            given = field.get(name, [])
            for literal in [given] if isinstance(given, str) else given:
                yield regex.compile(regex.escape(literal))
            if pattern := field.get(f"{name}_pattern"):
                yield regex.compile(pattern, regex.DOTALL)


def _looks_around(pattern: Any) -> bool:
    """Whether a pattern can depend on what stands before it."""
    return re.search(r"\(\?<[=!]|\\[bBAG]|(?<!\[)\^", pattern.pattern) is not None


def _begins(pattern: Any, characters: str) -> bool:
    """Whether a pattern can begin with one of some characters."""
    return any(_matches(pattern, character) for character in characters)


def _goes_on(pattern: Any, start: str) -> bool:
    """Whether a letter can follow where a pattern begins with a blank."""
    return any(_matches(pattern, start + letter, len(start)) for letter in _LETTERS)


def _matches(pattern: Any, text: str, beyond: int = 0) -> bool:
    match = pattern.match(text, partial=True)
    return match is not None and match.end() > beyond
