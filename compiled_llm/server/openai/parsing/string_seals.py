"""Strings in calls that only HuggingFace's parser can read, whole: sealed, lest it finds the end of a call in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import regex  # type: ignore[import-untyped]  # as transformers' parser; it finds matches that only begin

from compiled_llm.server.openai.parsing.delimiters import pattern_of

_DOUBLE, _SINGLE = (rf"{quote}(?:[^{quote}\\\x00-\x1f]|\\.)*{quote}" for quote in "\"'")
_STRINGS = {"json": [_DOUBLE], "python-call-list": [_DOUBLE, _SINGLE]}
_FIRST_SEAL = 0xFDD0  # the first of 32 code points that Unicode has for no character


class StringSeals:
    """Seals of strings of calls in a response template: a character of each call's end becomes one of no text."""

    def __init__(self, field: Mapping[str, Any]) -> None:
        marks = field.get("content_args", {}).get("string_delims", [])
        strings = [f"{regex.escape(begin)}.*?{regex.escape(end)}" for begin, end in marks]
        strings += _STRINGS.get(field.get("content", "text"), [])
        self._strings = [regex.compile(string, regex.DOTALL) for string in strings]
        self._close = pattern_of(field, "close")
        self._seals: dict[str, str] = {}

    def sealed(self, text: str) -> tuple[str, bool]:
        """Return a call's text without what may become a string or the end, and whether the call ends there."""
        done, place = "", 0
        while (found := self._next(text, place)) is not None:
            done, place = done + text[place : found.start()], found.start()
            if found.partial:
                return done, False
            ends = found.re is self._close
            done, place = done + (found.group() if ends else self._without_end(found.group())), found.end()
            if ends:
                return done, True
        return done + text[place:], False

    def _next(self, text: str, place: int) -> Any:
        """Return the first match of a string or the end, whole or partial; None if there is none."""
        patterns = [*self._strings, self._close] if self._strings and self._close is not None else []
        matches = [pattern.search(text, place, partial=True) for pattern in patterns]  # as one, whole ones would win
        return min((found for found in matches if found is not None), key=lambda found: found.start(), default=None)

    def opened(self, text: str) -> str:
        for character, seal in self._seals.items():
            text = text.replace(seal, character)
        return text

    def _without_end(self, string: str) -> str:
        while (found := self._close.search(string)) is not None and (mark := found.group().strip()):
            place = found.start() + found.group().index(mark)
            seal = self._seals.setdefault(string[place], chr(_FIRST_SEAL + len(self._seals)))
            string = string[:place] + seal + string[place + 1 :]
        return string
