"""Arguments of a call as tags, one for each, as Qwen3.5 writes them; they become JSON as they come."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import regex  # type: ignore[import-untyped]  # as transformers' parser: both need the same blanks

from compiled_llm.server.openai.parsing.half_characters import written
from compiled_llm.server.openai.parsing.json_value import JsonValue

_CHARACTER = r"[^\\()\[\]{}*+?.|^$]"
_LITERAL = rf"(?:{_CHARACTER}|\\s\*)*{_CHARACTER}"
_KEY = r"\(\?P<key>(?:\[\^[^\]]+\]|\\w)\+\)"
_SPACE = r"\\s\*"
_PATTERN = re.compile(
    rf"(?P<begin>{_LITERAL}{_KEY}{_LITERAL})(?P<before>{_SPACE})?"
    rf"\(\?P<value>\.\*\?\)(?P<after>{_SPACE})?(?P<end>{_CHARACTER}+)"
)
"""Patterns of tags that can be found as they come: a name between two texts, and a value that a text ends."""
_SPACES = "".join(space for space in map(chr, range(0x3001)) if regex.match(r"\s", space))

_LONGEST_TAG = 1024  # characters of the beginning of an argument, with its name


@dataclass(frozen=True)
class XmlTags:
    """The tags of an argument."""

    begin: Any  # matches the text before a value, with its ``key``
    spaces_before: str  # are no part of a value if it begins with them
    spaces_after: str  # if it ends with them
    end: str  # stands after a value

    @classmethod
    def of(cls, pattern: str) -> XmlTags | None:
        """Return those of a response template's pattern; None if they cannot be found as they come."""
        found = _PATTERN.fullmatch(pattern)
        if found is None:
            return None
        before, after = (_SPACES if found[name] else "" for name in ("before", "after"))
        return cls(regex.compile(found["begin"], regex.DOTALL), before, after, found["end"])

    def sure(self, text: str) -> str:
        """Return the part of a value's text that stays as it is, whatever follows."""
        begun = next((size for size in range(len(self.end) - 1, 0, -1) if text.endswith(self.end[:size])), 0)
        return text[: len(text) - begun].rstrip(self.spaces_after)


class XmlArguments:
    """A reader of the arguments of one call: those that are texts piece by piece, others whole."""

    def __init__(
        self,
        name: str,
        tags: XmlTags,
        properties: Mapping[str, Any],
        read: Callable[[str], Mapping[str, Any]],
        are_closed: bool = False,
    ) -> None:
        self.name: str | None = name
        self._tags, self._properties, self._read = tags, properties, read
        self._rest = self._tag = ""
        self._key: str | None = None
        self._count = 0
        self._are_closed = are_closed

    @property
    def is_in_string(self) -> bool:
        return self._key is not None and (self._are_closed or self._json.hides)

    def read(self, text: str) -> str:
        self._rest += text
        found = []
        while (new := self._begin() if self._key is None else self._value(self._key)) is not None:
            found.append(new)
        return "".join(found)

    def end(self, closed: bool) -> str:
        """As of ``CallText``; a cut call stays so, lest it looks whole."""
        if not closed:
            return ""
        last = "" if self._key is None else self.read(self._tags.end)
        return last + ("}" if self._count else "{}")

    def cut(self) -> None:
        """Do nothing: it has its name from the beginning."""

    def _begin(self) -> str | None:
        found = self._tags.begin.search(self._rest)
        if found is None:
            self._rest = self._rest[-_LONGEST_TAG:]  # all of which is looked at again with each piece
            return None
        key = str(found["key"])
        self._key, self._tag, self._rest = key, found.group(), self._rest[found.end() :]
        self._count += 1
        self._is_begun = False
        self._json, self._looked = JsonValue(), 0
        before = "{" if self._count == 1 else ", "
        return f"{before}{written(key)}: " + ('"' if self._is_text(key) else "")

    def _value(self, key: str) -> str | None:
        if not self._is_begun:
            self._rest = self._rest.lstrip(self._tags.spaces_before)
        end = self._end(key)
        if end >= 0:
            text, self._rest = self._rest[:end], self._rest[end + len(self._tags.end) :]
            self._key = None
            text = text.rstrip(self._tags.spaces_after)
            return written(text)[1:] if self._is_text(key) else self._typed(key, text)
        if not self._is_text(key) or not (text := self._tags.sure(self._rest)):
            return None
        self._is_begun, self._rest = True, self._rest[len(text) :]
        return written(text)[1:-1]

    def _end(self, key: str) -> int:
        """Return where the end of a value begins: in no string of an object or array; -1 if it is not there yet."""
        if self._is_text(key) or not self._rest.startswith(("{", "[")):
            return self._rest.find(self._tags.end)
        while self._looked < len(self._rest):
            end = self._rest.find(self._tags.end, max(self._looked - len(self._tags.end) + 1, 0))
            begin, self._looked = self._looked, len(self._rest) if end < 0 else end + len(self._tags.end)
            self._json.take(self._rest[begin : self._looked])
            if end >= 0 and not self._json.hides:
                return end
        return -1

    def _is_text(self, key: str) -> bool:
        """Whether the value of an argument is the model's text as it is."""
        schema = self._properties.get(key)
        if not isinstance(schema, Mapping):
            return True
        others = any(schema.get(name) for name in ("anyOf", "oneOf", "nullable"))
        return schema.get("type", "string") == "string" and not others

    def _typed(self, key: str, text: str) -> str:
        try:
            value = self._read(self._tag + _without(self._tags.end[0], text) + self._tags.end)[key]
        except Exception:  # of HuggingFace's parser, on a text of the model's
            value = text
        return written(text if isinstance(value, str) else value)


def _without(character: str, text: str) -> str:
    """Return a text so that it has no such character if it is JSON: what stands in its strings would end the call."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text.replace(character, f"\\u{ord(character):04x}")
