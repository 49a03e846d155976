"""Where a JSON value ends that comes piece by piece."""

from __future__ import annotations

import re

_SCALAR_ENDS = re.compile(r"[\s,\]}]")
_IN_STRING, _OUTSIDE = re.compile(r'["\\\x00-\x1f]'), re.compile(r'["{}\[\]]')


class JsonValue:
    """A finder of the end of a value, and its strings, by quotes and brackets alone: other text is not looked at."""

    def __init__(self) -> None:
        self.finished = False
        self._begun = self._is_scalar = self._in_string = self._escaped = False
        self._has_control = False
        self._depth = 0

    @property
    def hides(self) -> bool:
        """Whether it stands in a string, where text means nothing; one with a raw line break is no string of JSON."""
        return self._in_string and not self._has_control

    def take(self, text: str) -> int:
        """Return how many characters of the next piece belong to the value, blanks before it included."""
        place = 0
        if not self._begun:
            place = len(text) - len(text.lstrip())
            self._begun = place < len(text)
            self._is_scalar = self._begun and text[place] not in '{["'
        if self._is_scalar and not self.finished:
            end = _SCALAR_ENDS.search(text, place)
            self.finished = end is not None
            return len(text) if end is None else end.start()
        while place < len(text) and not self.finished:
            place = self._next(text, place)
        return place

    def _next(self, text: str, place: int) -> int:
        """Pass over the next character that means something, and all before it."""
        if self._escaped:
            self._escaped = False
            return place + 1
        found = (_IN_STRING if self._in_string else _OUTSIDE).search(text, place)
        if found is None:
            return len(text)
        match found.group():
            case "\\":
                self._escaped = True
            case '"':
                self._in_string = not self._in_string
            case "{" | "[":
                self._depth += 1
            case "}" | "]":
                self._depth -= 1
            case _:
                self._has_control = True
        self.finished = self._depth == 0 and not self._in_string
        return found.end()
