"""The delimiters of an answer's parts; a text that is clear of them needs no parser."""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Mapping
from typing import Any

import regex  # type: ignore[import-untyped]  # transformers' parser uses it; it finds matches that only begin

_LETTERS = "aé漢"  # a pattern that can begin with one of these can begin with anything


class Delimiters:
    """The delimiters in the fields of a response template, and the characters that they can begin with."""

    def __init__(self, fields: Mapping[str, Mapping[str, Any]]) -> None:
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

    def find(self, name: str, which: str, text: str) -> Any:
        """Return the first match of a part's ``open`` or ``close`` in a text; None if there is none."""
        pattern = self._patterns.get(f"{name} {which}")
        return None if pattern is None else pattern.search(text)

    def begun_opening(self, name: str, text: str) -> Any:
        """Return the match of a part's beginning at the end of a text; a single character may be anything."""
        pattern = self._patterns.get(f"{name} open")
        found = None if pattern is None else pattern.search(text, partial=True)
        ends_text = found is not None and found.end() == len(text) and len(found.group().strip()) > 1
        return found if ends_text else None

    def are_far_from(self, text: str) -> bool:
        """Whether no delimiter stands in a text, and none begins at its end."""
        return self._are_known and self._hard.search(text) is None and not text.endswith(self._soft)


def _patterns(fields: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield patterns of beginnings and ends by the names of both."""
    for part, field in fields.items():
        for name in ("open", "close"):
            pattern = pattern_of(field, name)
            if pattern is not None:
                yield f"{part} {name}", pattern


def pattern_of(field: Mapping[str, Any], name: str) -> Any:
    """Return a pattern that a response template has by a name; of several literals the longest is tried first."""
    given = field.get(name, [])
    literals = sorted([given] if isinstance(given, str) else given, key=len, reverse=True)
    pattern = field.get(f"{name}_pattern") or "|".join(map(regex.escape, literals))
    return regex.compile(pattern, regex.DOTALL) if pattern else None


def _looks_around(pattern: Any) -> bool:
    """Whether a pattern can depend on the text before it."""
    return re.search(r"\(\?<[=!]|\\[bBAG]|(?<!\[)\^", pattern.pattern) is not None


def _begins(pattern: object, characters: str) -> bool:
    return any(_matches(pattern, character) for character in characters)


def _goes_on(pattern: object, start: str) -> bool:
    """Whether a letter can follow where a pattern begins with a blank."""
    return any(_matches(pattern, start + letter, len(start)) for letter in _LETTERS)


def _matches(pattern: Any, text: str, beyond: int = 0) -> bool:
    match = pattern.match(text, partial=True)
    return match is not None and match.end() > beyond
