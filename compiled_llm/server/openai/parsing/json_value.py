"""Where a JSON value ends that comes piece by piece."""

from __future__ import annotations

import re

_SCALAR_ENDS = re.compile(r"[\s,\]}]")
_IN_STRING, _OUTSIDE = re.compile(r'["\\]'), re.compile(r'["{}\[\]]')


class JsonValue:
    """Finds the end of a value by its strings and brackets alone: other text is not looked at."""

    def __init__(self) -> None:
        self.finished = False
        self._begun = self._is_scalar = self._in_string = self._escaped = False
        self._depth = 0

    def take(self, text: str) -> int:
        """Return how many characters of the next piece, which is not empty, belong to the value."""
        if not self._begun:
            self._begun, self._is_scalar = True, text[0] not in '{["'
        if self._is_scalar:
            end = _SCALAR_ENDS.search(text)
            self.finished = end is not None
            return len(text) if end is None else end.start()
        place = 0
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
            case _:
                self._depth -= 1
        self.finished = self._depth == 0 and not self._in_string
        return found.end()
