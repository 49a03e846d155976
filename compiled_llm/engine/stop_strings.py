"""Strings that end an answer, in text that comes in pieces."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple


class Match(NamedTuple):
    """Where a stop string stands in a text."""

    string: str
    start: int
    end: int


class StopStrings:
    """Finds stop strings, wherever a text is cut into pieces."""

    def __init__(self, strings: Sequence[str]) -> None:
        """Look for strings.

        Args:
            strings: none of them empty.
        """
        self._strings = strings
        self._longest = max(map(len, strings))
        self._any = re.compile("|".join(map(re.escape, strings)))
        self._begins = frozenset("".join(string[:-1] for string in strings))

    def find(self, text: str, searched: int) -> Match | None:
        """Return the stop string that ends first, of those that end together the one that is listed first.

        Args:
            text: as far as it is known.
            searched: characters at the beginning in which none is to end.
        """
        if self._any.search(text, max(0, searched - self._longest + 1)) is None:  # as in nearly all steps
            return None
        found = [match for string in self._strings if (match := _match(string, text, searched)) is not None]
        return min(found, key=lambda match: match.end, default=None)

    def begun(self, text: str) -> int:
        """Return how many characters at a text's end may be the beginning of a stop string."""
        if text[-1:] not in self._begins:
            return 0
        return max((_overlap(string, text) for string in self._strings), default=0)


def _match(string: str, text: str, searched: int) -> Match | None:
    start = text.find(string, max(0, searched - len(string) + 1))
    return None if start < 0 else Match(string, start, start + len(string))


def _overlap(string: str, text: str) -> int:
    """Return how many characters at a text's end a string begins with, fewer than all of its own."""
    start = text.find(string[0], max(0, len(text) - len(string) + 1))
    while start >= 0:
        if string.startswith(text[start:]):
            return len(text) - start
        start = text.find(string[0], start + 1)
    return 0
