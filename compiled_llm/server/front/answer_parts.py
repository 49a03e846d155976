"""What an answer consists of: reasoning, content, and calls of tools."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from compiled_llm.server.front.delimiters import Delimiters

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names that response templates have for the part in which a model thinks."""
CONTENT, CALLS = "content", "tool_calls"
_PIECES = re.compile(r"(?=[<\[{\n])|(?<=[>\]}\n])")


class Call(NamedTuple):
    """A call of a tool: the function, and its arguments as JSON."""

    id: str
    name: str
    arguments: str


@dataclass
class Parts:
    """Parts of an answer, or what is new of them."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)

    @property
    def is_content(self) -> bool:
        """Whether there is nothing but content, which may be none."""
        return not (self.reasoning or self.calls)


class PartsReader(Protocol):
    """Reads one answer as it comes."""

    def read(self, text: str, over: bool) -> Parts:
        """Return what is new, by the next piece of text; nothing comes after one that is ``over``."""
        ...


class PlainReader:
    """Reads an answer that is all content."""

    def read(self, text: str, over: bool) -> Parts:
        """Return the text."""
        return Parts(content=text)


class ParsedReader:
    """Reads an answer by HuggingFace's parser; what that cannot read is content."""

    def __init__(
        self, parser: Any, fields: Mapping[str, Any], delimiters: Delimiters, several_calls: bool = True
    ) -> None:
        """Begin with what the prompt has begun.

        Args:
            parser: of ``tokenizer.get_response_parser``.
            fields: of the response template.
            delimiters: of these fields.
            several_calls: whether calls after the first one are told of.
        """
        self._parser: Any = parser
        self._most_calls = None if several_calls else 1
        self._calls = 0
        self._untold = ""
        self._delimiters = delimiters
        self._implicit = CONTENT if _is_implicit(fields.get(CONTENT)) else None
        self._part: str | None = self._implicit
        self._texts = {name: _Trimmed(_strips(fields.get(name, {}))) for name in (CONTENT, *REASONING)}
        for event in parser.initial_events:
            self._take(event, Parts())

    def read(self, text: str, over: bool) -> Parts:
        """Return what is new."""
        parts = Parts()
        for piece in [text] if self._delimiters.are_far_from(text) else _PIECES.split(text):
            self._feed(piece, parts)
        if over:
            self._finish(parts)
        return parts

    def _feed(self, piece: str, parts: Parts) -> None:
        if self._part in self._texts and not self._untold and self._delimiters.are_far_from(piece):
            self._add(self._part, piece, parts)  # the parser would find nothing in it, and takes longer
            return
        self._untold += piece
        if self._parser is not None:
            self._take_all(lambda: self._parser.feed(piece), parts)
        else:
            self._tell_rest(parts)

    def _finish(self, parts: Parts) -> None:
        if self._parser is not None:
            self._take_all(lambda: self._parser.finalize()[1], parts)

    def _take_all(self, events: Any, parts: Parts) -> None:
        try:
            for event in events():
                self._take(event, parts)
        except Exception:  # whatever a template does with what the model should not have written
            self._parser, self._part = None, CONTENT
            self._tell_rest(parts)

    def _tell_rest(self, parts: Parts) -> None:
        parts.content += self._texts[CONTENT].add(self._untold)
        self._untold = ""

    def _take(self, event: Mapping[str, Any], parts: Parts) -> None:
        name, kind = event["field"], event["type"]
        if kind == "region_chunk" and name in self._texts:
            self._untold = self._untold.partition(event["text"])[2]
            self._add(name, event["text"], parts)
        elif kind == "region_open":
            self._part = name
        elif kind == "region_close" and name == CALLS:
            parts.calls += self._new_calls(event["value"])
        if kind == "region_close":
            self._part = self._implicit
            self._untold = "" if name != CONTENT else self._untold  # content ends where another part begins

    def _add(self, name: str, text: str, parts: Parts) -> None:
        text = self._texts[name].add(text)
        if name == CONTENT:
            parts.content += text
        else:
            parts.reasoning += text

    def _new_calls(self, value: Any) -> list[Call]:
        calls = [_call(entry) for entry in (value if isinstance(value, list) else [value])]
        told = calls if self._most_calls is None else calls[: self._most_calls - self._calls]
        self._calls += len(told)
        return told


class _Trimmed:
    """A text as it comes, without whitespace at its ends."""

    def __init__(self, strips: bool) -> None:
        self._strips = strips
        self._begun = False
        self._space = ""

    def add(self, text: str) -> str:
        """Return what is certain by now."""
        if not self._strips:
            return text
        text = self._space + text if self._begun else text.lstrip()
        kept = text.rstrip()
        self._begun = self._begun or bool(kept)
        self._space = text[len(kept) :]
        return kept


def _is_implicit(spec: Mapping[str, Any] | None) -> bool:
    """Whether a part is all text that stands in no other."""
    return spec is not None and not ("open" in spec or "open_pattern" in spec)


def _strips(spec: Mapping[str, Any]) -> bool:
    return bool(spec.get("content_args", {}).get("strip", True))


def _call(value: Mapping[str, Any]) -> Call:
    """Return a call as the parser gives it.

    Raises:
        ValueError: it has no name.
    """
    function = value["function"]
    name, arguments = function["name"], function.get("arguments", function.get("parameters", {}))
    if not isinstance(name, str) or not name:
        raise ValueError("a call without a name")
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return Call(f"call_{secrets.token_hex(12)}", name, written)
