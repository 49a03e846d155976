"""Calls of tools as they come: the name of the function, then the arguments as JSON, piece by piece."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Protocol

import regex  # type: ignore[import-untyped]  # as transformers' parser; it finds matches that only begin

from compiled_llm.server.openai.parsing.half_characters import escaped, replaced
from compiled_llm.server.openai.parsing.json_value import JsonValue

_MEMBER = r'\s*{}\s*"(?P<key>(?:[^"\\]|\\.)*)"\s*:\s*(?=\S)'
_FIRST, _NEXT = (regex.compile(_MEMBER.format(before), regex.DOTALL) for before in (r"\{", ","))
_LONGEST_NAME = 1024
"""Characters of a member's name with the blanks around it; each piece of it has all of it looked at again."""
_END = regex.compile(r"\s*\}")


class CallText(Protocol):
    """A reader of the text of one call; the function's ``name`` is None until it is certain that this is a call."""

    name: str | None

    @property
    def is_in_string(self) -> bool:
        """Whether its text so far ends in a string: no call ends there."""
        ...

    def read(self, text: str) -> str:
        """Return the new part of the arguments; empty before there is a name."""
        ...

    def end(self, closed: bool) -> str:
        """Return the end of the arguments; ``closed`` says whether the model itself has ended the call."""
        ...

    def cut(self) -> None:
        """Note that there was no room for more: with a name, it is a call."""
        ...


class JsonCall:
    """A call whose text is an object of JSON: its name and its arguments are members, under one of these keys."""

    def __init__(self, name: str, arguments: Sequence[str]) -> None:
        self.name: str | None = None
        self._value = JsonValue()
        self._name_key, self._argument_keys = name, arguments
        self._called: str | None = None
        self._new: str | None = None  # of the arguments; None before them
        self._rest, self._before, self._finished = "", _FIRST, False
        self._member: _ObjectMember | None = None

    @property
    def is_in_string(self) -> bool:
        return self._value.hides

    def read(self, text: str) -> str:
        """As of ``CallText``; arguments wait for the name."""
        self._value.take(text)
        self._rest = "" if self._finished else self._rest + text
        while self._rest and not self._finished and self._step():
            pass
        if self._called is None or self._new is None:
            return ""
        self.name, new, self._new = self._called, self._new, ""
        return new

    def end(self, closed: bool) -> str:
        """As of ``CallText``; a cut call stays as it is."""
        return ""

    def cut(self) -> None:
        self.name = self._called

    def _step(self) -> bool:
        if self._member is None:
            return self._begin_member()
        text = self._member.part(self._rest)
        self._rest = self._rest[len(text) :]
        if self._member.streams:
            self._new = (self._new or "") + text
        if self._member.finished:
            self._end_member(self._member)
        return self._member is None

    def _begin_member(self) -> bool:
        found = self._before.match(self._rest, partial=True)
        if found is None:  # the object ends here, or this is none
            self._finished = True
            if self._new is None and self._before is _NEXT and _END.match(self._rest):
                self._new = "{}"  # a call without arguments may leave them out
        elif found.end() > _LONGEST_NAME:
            self._finished = True
        elif not found.partial:
            key, self._rest = found["key"], self._rest[found.end() :]
            self._member = _ObjectMember(key, self._is_arguments(key) and self._rest[0] == "{")
        return self._member is not None

    def _is_arguments(self, key: str) -> bool:
        return key in self._argument_keys and self._new is None

    def _end_member(self, member: _ObjectMember) -> None:
        self._member, self._before = None, _NEXT
        if member.streams:
            return
        try:
            value = json.loads(member.text)
        except (ValueError, RecursionError):
            self._finished = True
            return
        if member.key == self._name_key and self._called is None:
            self._called = replaced(value) if isinstance(value, str) and value else None
        elif self._is_arguments(member.key):
            self._new = escaped(value) if isinstance(value, str) else member.text


class JsonArguments:
    """A call whose text is its arguments as JSON; the name stands before it."""

    def __init__(self, name: str) -> None:
        self.name: str | None = None
        self._called = name
        self._member: _ObjectMember | None = None

    @property
    def is_in_string(self) -> bool:
        return self._member is not None and self._member.hides

    def read(self, text: str) -> str:
        if self._member is None:
            text = text.lstrip()
            self._member = _ObjectMember("", text[0] == "{") if text else None
        if self._member is None:
            return ""
        new = self._member.part(text)
        if not self._member.streams:
            return ""
        self.name = self._called
        return new

    def end(self, closed: bool) -> str:
        """As of ``CallText``; arguments that are no object come whole."""
        if self._member is None or self._member.streams:
            return ""
        try:
            value = json.loads(self._member.text)
        except (ValueError, RecursionError):
            return ""
        self.name = self._called
        return escaped(value) if isinstance(value, str) else self._member.text

    def cut(self) -> None:
        self.name = self._called


class _ObjectMember(JsonValue):
    """A member of an object that is being read; its text is kept unless it streams."""

    def __init__(self, key: str, streams: bool) -> None:
        super().__init__()
        self.key, self.streams, self.text = key, streams, ""

    def part(self, text: str) -> str:
        """Return the part of the next piece that belongs to it."""
        new = text[: self.take(text)] if text and not self.finished else ""
        if not self.streams:
            self.text += new
        return new
