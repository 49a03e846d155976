"""How a model writes calls of tools: found by having its chat template write some, and proved by reading them again."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from compiled_llm.server.openai.fields.tools import Function
from compiled_llm.server.openai.parsing.answer_parts import Parts

_NAME, _KEY, _VALUE = "sample_function", "sample_key", "sample_value"
_ARGUMENTS = {
    "json": re.compile(rf'\{{\s*"{_KEY}"\s*:\s*"{_VALUE}"\s*\}}'),
    "qwen_xml": re.compile(rf"<parameter={_KEY}>\s*{_VALUE}\s*</parameter>"),
}
"""How a template may have written the sample's arguments, by xgrammar's name for the style."""
_SCHEMA = {"type": "object", "properties": {_KEY: {"type": "string"}}}
SAMPLE_TOOL = {"type": "function", "function": {"name": _NAME, "description": "a sample", "parameters": _SCHEMA}}
"""The tool of the sample, as chat templates read it."""

Read = Callable[[str], Parts]  # returns the parts of an answer


_SAMPLE_IDS = ("sample000", "sample001")  # which templates of Mistral's models take, too


def sample_chat(calls: int, ids: Sequence[str] = _SAMPLE_IDS) -> list[dict[str, Any]]:
    """Return a chat whose last message has so many calls, with these ids; without any, it ends before that message."""
    function = {"name": _NAME, "arguments": {_KEY: _VALUE}}
    entries = [{"id": each, "type": "function", "function": function} for each in ids[:calls]]
    answer = {"role": "assistant", "content": "", "tool_calls": entries}
    return [{"role": "user", "content": "hi"}, *([answer] if calls else [])]


@dataclass(frozen=True)
class CallForm:
    """The texts around a call's name and arguments."""

    before_name: str  # begins a call
    before_arguments: str  # stands between the name and the arguments
    end: str  # ends a call
    separator: str | None  # stands between two calls; None if an answer cannot have several
    style: str = "json"  # of the arguments, as xgrammar calls it
    blanks: int | None = None  # how many they may have in a row; None for any number

    def several(self, functions: Sequence[Function], several: bool) -> dict[str, Any]:
        """Return calls, one at least, as a structural tag of xgrammar's; more than one only if ``several``."""
        return {
            "type": "tags_with_separator",
            "tags": [self._tag(function) for function in functions],
            "separator": self.separator or "",
            "at_least_one": True,
            "stop_after_first": not several or self.separator is None,
        }

    def beside_text(self, functions: Sequence[Function], several: bool) -> dict[str, Any]:
        """Return text that may have calls in it, as a structural tag of xgrammar's."""
        trigger = self.before_name.split()[0]
        tags = [self._tag(function) for function in functions]
        return {"type": "triggered_tags", "triggers": [trigger], "tags": tags, "stop_after_first": not several}

    def is_proved(self, arguments: str, read: Read) -> bool:
        """Whether calls in this form, with the sample's arguments, are read as calls."""
        one = f"{self.before_name}{_NAME}{self.before_arguments}{arguments}{self.end}"
        several = [one] if self.separator is None else [one, one + self.separator + one]
        return all(_is_read(read(text), number) for number, text in enumerate(several, start=1))

    def _tag(self, function: Function) -> dict[str, Any]:
        begin = self.before_name + function.name + self.before_arguments
        return {"type": "tag", "begin": begin, "content": self._arguments(function), "end": self.end}

    def _arguments(self, function: Function) -> dict[str, Any]:
        schema = function.schema_of_arguments
        return {"type": "json_schema", "json_schema": schema, "style": self.style, "max_whitespace_cnt": self.blanks}


def call_form(prompt: str, one: str, two: str | None, ends: Sequence[str], read: Read) -> CallForm | None:
    """Return how a model writes calls, from chats with no, ``one`` and ``two`` calls; None if it cannot be told."""
    for style, pattern in _ARGUMENTS.items():
        matches = list(pattern.finditer(one))
        if len(matches) == 1:
            form = _around(matches[0], prompt, two, ends, style)
            return form if form.before_name and form.is_proved(matches[0].group(), read) else None
    return None


def _around(match: re.Match[str], prompt: str, two: str | None, ends: Sequence[str], style: str) -> CallForm:
    """Return the form of a call whose arguments a match has found in a chat."""
    before, rest = match.string[: match.start()], match.string[match.end() :]
    end = rest[: min((place for text in ends if (place := rest.find(text)) >= 0), default=len(rest))].rstrip()
    again = _again(before, end, two, style)
    begin = before.removeprefix(prompt) if again is None else again
    head, _, middle = begin.lstrip().partition(_NAME)
    separator = None if again is None else begin[: len(begin) - len(begin.lstrip())]
    return CallForm(head, middle, end, separator, style)


def _again(before: str, end: str, two: str | None, style: str) -> str | None:
    """Return the text between the end of a call and the arguments of the next; None if calls do not repeat."""
    matches = list(_ARGUMENTS[style].finditer(two or ""))
    if two is None or len(matches) != 2:
        return None
    between = two[matches[0].end() : matches[1].start()]
    again = between.removeprefix(end)
    return again if between.startswith(end) and before.endswith(again.lstrip()) else None


def _is_read(parts: Parts, calls: int) -> bool:
    wanted = (_NAME, {_KEY: _VALUE})
    found = [(call.name, json.loads(call.arguments)) for call in parts.calls]
    return found == [wanted] * calls and not parts.content and not parts.reasoning
