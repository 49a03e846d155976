"""Response templates, HuggingFace's and others, and two functions that their answers call."""

from __future__ import annotations

from typing import Any

from compiled_llm.compat.response_templates import known_response_template
from support.server.scripted import RESPONSES

TYPES = {"days": "integer", "share": "number", "now": "boolean", "where": "object", "all": "array", "text": "string"}
PROPERTIES = {**{name: {"type": kind} for name, kind in TYPES.items()}, "maybe": {"type": ["string", "null"]}}
TOOLS = [
    {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": PROPERTIES}}},
    {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}},
]


def with_calls(calls: dict[str, Any]) -> dict[str, Any]:
    return {**RESPONSES, "fields": {**RESPONSES["fields"], "tool_calls": {"repeats": True, **calls}}}  # type: ignore[dict-item]


def function(name: str, arguments: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


NAMED = with_calls(
    {
        "open_pattern": r"<call:(?P<name>\w+)>",
        "close_pattern": r"</call>\s*",  # which is certain only once something else follows
        "content": "json",
        "transform": function("{name}", "{content}"),
    }
)
MEMBERS = with_calls(
    {
        "open": ["[CALL]", "[CALL"],
        "close": "[END]",
        "content": "json",
        "transform": function("{content.tool}", "{content.with}"),
    }
)
LISTED = with_calls(
    {
        "open": "<calls>",
        "close": "</calls>",
        "content": "json",
        "transform": function("{name}", "{arguments}"),
        "transform_each": True,
        "repeats": False,
    }
)
SPECS = {
    "hermes": RESPONSES,
    "qwen3": known_response_template("qwen3") or {},
    "qwen3_5": known_response_template("qwen3_5") or {},
    "gemma4": known_response_template("gemma4") or {},
    "named": NAMED,
    "members": MEMBERS,
    "listed": LISTED,
}
