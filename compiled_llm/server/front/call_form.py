"""How a model writes calls of tools: found by having its chat template write some, and proved by reading them again."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from compiled_llm.server.front.answer_parts import Parts
from compiled_llm.server.front.tool_fields import Function

_NAME, _KEY, _VALUE = "sample_function", "sample_key", "sample_value"
_ARGUMENTS = re.compile(rf'\{{\s*"{_KEY}"\s*:\s*"{_VALUE}"\s*\}}')
_SCHEMA = {"type": "object", "properties": {_KEY: {"type": "string"}}}
SAMPLE_TOOL = {"type": "function", "function": {"name": _NAME, "description": "a sample", "parameters": _SCHEMA}}
"""What is called, as chat templates read it."""

Read = Callable[[str], Parts]
"""Returns the parts of an answer."""


def sample_chat(calls: int) -> list[dict[str, Any]]:
    """Return a chat whose last message has so many calls; without any, it ends before that message."""
    function = {"name": _NAME, "arguments": {_KEY: _VALUE}}
    entries = [{"id": f"sample{number:03}", "type": "function", "function": function} for number in range(calls)]
    answer = {"role": "assistant", "content": "", "tool_calls": entries}
    return [{"role": "user", "content": "hi"}, *([answer] if calls else [])]


@dataclass(frozen=True)
class CallForm:
    """What stands around a call's name and arguments, which are JSON.

    Attributes:
        before_name: begins a call.
        before_arguments: stands between the name and the arguments.
        end: ends a call.
        separator: stands between two calls; None if an answer cannot have several.
    """

    before_name: str
    before_arguments: str
    end: str
    separator: str | None

    def several(self, functions: Sequence[Function], several: bool) -> dict[str, Any]:
        """Return calls, one at least, as a structural tag of xgrammar's has them.

        Args:
            functions: that may be called.
            several: whether there may be more than one call.
        """
        one = {"type": "or", "elements": [self._call(function) for function in functions]}
        if not several or self.separator is None:
            return one
        parts = [{"type": "const_string", "value": self.separator}] if self.separator else []
        again = {"type": "sequence", "elements": [*parts, one]}
        return {"type": "sequence", "elements": [one, {"type": "star", "content": again}]}

    def beside_text(self, functions: Sequence[Function], several: bool) -> dict[str, Any]:
        """Return text that may have calls in it, as a structural tag of xgrammar's has it."""
        trigger = self.before_name.split()[0]
        tags = [self._tag(function) for function in functions]
        return {"type": "triggered_tags", "triggers": [trigger], "tags": tags, "stop_after_first": not several}

    def is_proved(self, read: Read) -> bool:
        """Whether calls in this form are read as what they are."""
        one = f'{self.before_name}{_NAME}{self.before_arguments}{{"{_KEY}": "{_VALUE}"}}{self.end}'
        several = [one] if self.separator is None else [one, one + self.separator + one]
        return all(_is_read(read(text), number) for number, text in enumerate(several, start=1))

    def _begin(self, function: Function) -> str:
        return self.before_name + function.name + self.before_arguments

    def _call(self, function: Function) -> dict[str, Any]:
        elements = [{"type": "const_string", "value": self._begin(function)}, _arguments(function)]
        end = [{"type": "const_string", "value": self.end}] if self.end else []
        return {"type": "sequence", "elements": [*elements, *end]}

    def _tag(self, function: Function) -> dict[str, Any]:
        return {"type": "tag", "begin": self._begin(function), "content": _arguments(function), "end": self.end}


def _arguments(function: Function) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": function.schema_of_arguments}


def call_form(prompt: str, one: str, two: str | None, ends: Sequence[str], read: Read) -> CallForm | None:
    """Return how a model writes calls; None if that cannot be told, or arguments are not written as JSON.

    Args:
        prompt: a chat as the model sees it, before the answer.
        one: the same chat with an answer that has one call.
        two: with an answer that has two; None if the chat template takes none.
        ends: texts of tokens that end an answer.
        read: reads an answer to the prompt.
    """
    match = _only(one)
    if match is None:
        return None
    before, rest = one[: match.start()], one[match.end() :]
    end = rest[: min((place for text in ends if (place := rest.find(text)) >= 0), default=len(rest))].rstrip()
    again = _again(before, end, two)
    begin = before.removeprefix(prompt) if again is None else again
    head, name, middle = begin.lstrip().partition(_NAME)
    separator = None if again is None else begin[: len(begin) - len(begin.lstrip())]
    form = CallForm(head, middle, end, separator)
    return form if name and head and form.is_proved(read) else None


def _only(text: str) -> re.Match[str] | None:
    matches = list(_ARGUMENTS.finditer(text))
    return matches[0] if len(matches) == 1 else None


def _again(before: str, end: str, two: str | None) -> str | None:
    """Return what stands between the end of a call and the arguments of the next; None if calls do not repeat."""
    matches = list(_ARGUMENTS.finditer(two or ""))
    if two is None or len(matches) != 2:
        return None
    between = two[matches[0].end() : matches[1].start()]
    again = between.removeprefix(end)
    return again if between.startswith(end) and before.endswith(again.lstrip()) else None


def _is_read(parts: Parts, calls: int) -> bool:
    wanted = (_NAME, {_KEY: _VALUE})
    found = [(call.name, json.loads(call.arguments)) for call in parts.calls]
    return found == [wanted] * calls and not parts.content and not parts.reasoning
