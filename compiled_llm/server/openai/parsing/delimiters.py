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
        self._patterns = dict(_patterns(fields))
        patterns = list(self._patterns.values())
        self._are_known = not any(_looks_around(pattern) or _begins(pattern, _LETTERS) for pattern in patterns)
        possible = {*string.printable, *(character for pattern in patterns for character in pattern.pattern)}
        starts = {character for character in possible if any(_begins(pattern, character) for pattern in patterns)}
        soft = {
            start for start in starts if start.isspace() and not any(_goes_on(pattern, start) for pattern in patterns)
        }
        hard = "".join(map(re.escape, sorted(starts - soft)))
        self._hard = re.compile(f"[{hard}]" if hard else r"(?!)")
        self._soft = tuple(soft)

    def opening(self, name: str, text: str) -> Any:
        """Return the match of what begins a part, the first in a text; None if nothing does."""
        return self._match(f"{name} open", text)

    def begun_opening(self, name: str, text: str) -> Any:
        """Return the match of what begins a part at the end of a text, or may go on to; None if nothing does.

        A single character is no beginning: it may be anything.
        """
        pattern = self._patterns.get(f"{name} open")
        found = None if pattern is None else pattern.search(text, partial=True)
        ends_text = found is not None and found.end() == len(text) and len(found.group().strip()) > 1
        return found if ends_text else None

    def last_opening(self, name: str, text: str) -> str:
        """Return a text from where a part begins for the last time; nothing if none does."""
        pattern = self._patterns.get(f"{name} open")
        places = [] if pattern is None else [found.start() for found in pattern.finditer(text)]
        return text[places[-1] :] if places else ""

    def closing(self, name: str, text: str) -> Any:
        """Return the match of what ends a part, the first in a text; None if nothing does."""
        return self._match(f"{name} close", text)

    def _match(self, which: str, text: str) -> Any:
        pattern = self._patterns.get(which)
        return None if pattern is None else pattern.search(text)

    def are_far_from(self, text: str) -> bool:
        """Whether no delimiter stands in a text, and none begins at its end."""
        return self._are_known and self._hard.search(text) is None and not text.endswith(self._soft)


def _patterns(fields: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield what parts begin and end with, by the names of both; of several texts the longest is looked for first."""
    for part, field in fields.items():
        for name in ("open", "close"):
            given = field.get(name, [])
            literals = sorted([given] if isinstance(given, str) else given, key=len, reverse=True)
            pattern = field.get(f"{name}_pattern") or "|".join(map(regex.escape, literals))
            if pattern:
                yield f"{part} {name}", regex.compile(pattern, regex.DOTALL)


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
