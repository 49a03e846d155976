"""JSON schemas as users give them, and the keywords that a grammar can enforce."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from compiled_llm.requests.structured_outputs.bounds import check_json, check_length, check_parts

_ONE = ("additionalProperties", "items", "propertyNames", "unevaluatedProperties", "unevaluatedItems")
_SEVERAL = ("prefixItems", "anyOf", "oneOf", "allOf", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords whose values are a schema, a list of schemas, and schemas by name."""

_SCHEMAS_OF_TAGS = ("json_schema", "schema")
"""Keys of structural tags, of the present kind and of the older one, whose values are schemas."""

_IGNORED = (
    *("multipleOf", "uniqueItems", "contains", "minContains", "maxContains", "not", "if"),
    *("dependentRequired", "dependentSchemas", "dependencies"),
)
"""Keywords that xgrammar would pass over in silence."""

_FORMATS = (
    *("email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid"),
    *("uri", "uri-reference", "uri-template", "json-pointer", "relative-json-pointer"),
)
"""Formats of strings that xgrammar knows."""


_LONGEST_PATTERN = 128
"""Characters: to match a pattern takes milliseconds a token beyond that."""
_NEGATED = re.compile(r"\[\^(?:\\.|[^\]\\])*\]?")


def schema_text(schema: Any) -> str:
    """Return a schema as JSON.

    Args:
        schema: a mapping, its JSON, or a class of pydantic's.

    Raises:
        ValueError: it is none of these, is too large, or has a keyword that a grammar cannot enforce; says where.
    """
    found = _parsed(schema)
    if not isinstance(found, Mapping):
        raise ValueError("must be a JSON schema: a dict, its JSON, or a model class of pydantic's")
    check_parts(found)
    _check_each(found, _not_followed)
    try:
        text = json.dumps(_without_control_characters(found))
    except TypeError as error:
        raise ValueError(f"is no JSON: {error}") from error
    check_length(text)
    return text


def _parsed(schema: Any) -> Any:
    if isinstance(schema, type) and hasattr(schema, "model_json_schema"):
        return schema.model_json_schema()
    if not isinstance(schema, str):
        return schema
    check_json(schema)
    try:
        return json.loads(schema)
    except json.JSONDecodeError as error:
        raise ValueError(f"is no JSON: {error}") from error


def check_references(tag: Any) -> None:
    """Raise ValueError, with the place, if a schema in structural tags refers to anything outside of them."""
    if isinstance(tag, list):
        for part in tag:
            check_references(part)
    elif isinstance(tag, Mapping):
        for name, part in tag.items():
            if name in _SCHEMAS_OF_TAGS:
                _check_each(part, _outside)
            else:
                check_references(part)


def _check_each(schema: Any, wrong: Callable[[Mapping[str, Any]], Iterator[str]]) -> None:
    """Check a schema and those in it by ``wrong``, which yields the faults of one."""
    for place, part in _schemas(schema, "#"):
        for what in wrong(part):
            raise ValueError(f"has {what} at {place}, which grammars do not follow; leave it out")


def _schemas(schema: Any, place: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield a schema and those in it, each after its place."""
    if isinstance(schema, Mapping):
        yield place, schema
        for where, part in _parts(schema):
            yield from _schemas(part, f"{place}/{where}")


def _outside(schema: Mapping[str, Any]) -> Iterator[str]:
    if not str(schema.get("$ref", "#")).startswith("#"):
        yield f"$ref to {reprlib.repr(schema['$ref'])}, outside of the schema,"


def _not_followed(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield the parts of a schema itself that a grammar cannot enforce."""
    for keyword in _IGNORED:
        if keyword in schema and schema[keyword] is not False:
            yield keyword
    if len(schema.get("allOf", ())) > 1:
        yield "allOf of several"
    if ("pattern" in schema or "format" in schema) and ("minLength" in schema or "maxLength" in schema):
        yield "pattern or format beside minLength or maxLength"
    if any(character in _NEGATED.sub("", str(schema.get("pattern", ""))) for character in ('"', "\\\\")):
        yield "a pattern with a quote or a backslash, which JSON would spell otherwise,"
    if "string" in _types(schema) and schema.get("format", "date") not in _FORMATS:
        yield f"format {schema['format']!r}"
    yield from _outside(schema)


def _types(schema: Mapping[str, Any]) -> list[Any]:
    kinds = schema.get("type")
    return kinds if isinstance(kinds, list) else [kinds]


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for keyword, value in schema.items():
        if keyword in _NAMED and isinstance(value, Mapping):
            yield from ((f"{keyword}/{name}", part) for name, part in value.items())
        elif keyword in _SEVERAL and isinstance(value, list):
            yield from ((f"{keyword}/{number}", part) for number, part in enumerate(value))
        elif keyword in _ONE:
            yield keyword, value


def _without_control_characters(schema: Any) -> Any:
    """Return a schema whose strings of limited length have no control characters, which JSON does not allow."""
    # This can go once xgrammar bars them there, as it does in other strings; 0.2.8 does not.
    if not isinstance(schema, Mapping):
        return schema
    parts = {keyword: _each(keyword, value) for keyword, value in schema.items()}
    least, most = parts.get("minLength", 0), parts.get("maxLength", "")
    if not {"minLength", "maxLength"} & parts.keys() or max(least, most or 0) > _LONGEST_PATTERN:
        return parts
    return {name: part for name, part in parts.items() if name not in ("minLength", "maxLength")} | {
        "pattern": f"^.{{{least},{most}}}$"
    }


def _each(keyword: str, value: Any) -> Any:
    if keyword in _NAMED and isinstance(value, Mapping):
        return {name: _without_control_characters(part) for name, part in value.items()}
    if keyword in _SEVERAL and isinstance(value, list):
        return [_without_control_characters(part) for part in value]
    return _without_control_characters(value) if keyword in _ONE else value
