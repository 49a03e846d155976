"""How a response template writes calls, if that can be read as they come."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from compiled_llm.server.openai.parsing.call_text import CallText, JsonArguments, JsonCall
from compiled_llm.server.openai.parsing.xml_arguments import XmlArguments, XmlTags

_CONTENT = "{content}"
_MEMBER, _CAPTURE = re.compile(r"\{content\.(\w+)\}"), re.compile(r"\{(?!content\})(\w+)\}")
_ARGUMENTS = ("arguments", "parameters")


class Begun(NamedTuple):
    """The facts of a call when it begins."""

    captures: Mapping[str, str]  # that the template has found before its text
    tools: Sequence[Mapping[str, Any]]  # that may be called, as chat templates read them
    # returns the arguments of the call with a text as HuggingFace's parser reads them, all at once
    read: Callable[[str], Mapping[str, Any]]
    is_held: bool  # whether the call is held to its form

    def properties(self, name: str) -> Mapping[str, Any]:
        """Return a function's parameters as JSON schemas; none of an unknown function."""
        functions = [tool["function"] for tool in self.tools]
        found = [function["parameters"].get("properties") for function in functions if function["name"] == name]
        return found[0] if found and isinstance(found[0], Mapping) else {}


CallStyle = Callable[[Begun], CallText]  # returns a reader of one call


def call_style_of(field: Mapping[str, Any]) -> CallStyle | None:
    """Return how a response template's field writes calls; None if only HuggingFace's parser can read them, whole."""
    transform = field.get("transform")
    function = transform.get("function") if isinstance(transform, Mapping) else None
    if function == _CONTENT and not field.get("transform_each"):
        return (lambda begun: JsonCall("name", _ARGUMENTS)) if _is_json(field) else None
    if field.get("transform_each") or not isinstance(function, Mapping):
        return None
    name, arguments = str(function.get("name")), str(function.get("arguments", function.get("parameters")))
    members = _MEMBER.fullmatch(name), _MEMBER.fullmatch(arguments)
    if members[0] and members[1]:
        keys = members[0][1], (members[1][1],)
        return (lambda begun: JsonCall(*keys)) if _is_json(field) else None
    capture = _CAPTURE.fullmatch(name)
    if capture is None or arguments != _CONTENT:
        return None
    if _is_json(field):
        return lambda begun: JsonArguments(begun.captures[capture[1]])
    return _xml_arguments(capture[1], field)


def text_of_calls(field: Mapping[str, Any]) -> dict[str, Any]:
    """Return the field of calls so that HuggingFace's parser finds their places, and reads nothing in them."""
    return {**field, "content": "text", "content_args": {"strip": False}, "transform": {"text": _CONTENT}}


def _is_json(field: Mapping[str, Any]) -> bool:
    return field.get("content") == "json" and not field.get("content_args")  # which stand for dialects


def _xml_arguments(capture: str, field: Mapping[str, Any]) -> CallStyle | None:
    if field.get("content") != "xml-inline" or field.get("content_args", {}).keys() != {"tag_pattern"}:
        return None
    tags = XmlTags.of(field["content_args"]["tag_pattern"])
    if tags is None:
        return None

    def made(begun: Begun) -> CallText:
        name = begun.captures[capture]
        return XmlArguments(name, tags, begun.properties(name), begun.read, begun.is_held)

    return made
