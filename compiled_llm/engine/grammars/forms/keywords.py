"""The keywords of JSON schemas: what each must be, which grammars can follow, and which say nothing about values."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")

_ANNOTATIONS = (
    *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "discriminator"),
    *("$comment", "$schema", "$vocabulary", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$defs", "definitions"),
    *("contentEncoding", "contentMediaType", "contentSchema", "externalDocs", "xml", "nullable"),
)
"""Those of JSON Schema and of OpenAPI that values need not follow, besides those that begin with ``x-``."""

_NEVER_FOLLOWED = (
    *("multipleOf", "uniqueItems", "contains", "minContains", "maxContains", "not", "if", "then", "else"),
    *("dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef"),
)

FORMATS = (
    *("email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid"),
    *("uri", "uri-reference", "uri-template", "json-pointer", "relative-json-pointer"),
)
"""Formats of strings that xgrammar knows."""

WHOLE = 2**63  # whole numbers are smaller: xgrammar has 64 bits for them


class NotFollowedError(ValueError):
    """A schema has something that a grammar cannot follow; the message says what, and not where."""


def _is_schema(value: object) -> bool:
    return isinstance(value, (Mapping, bool))


def _are_schemas(value: object) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(map(_is_schema, value))


def _named_schemas(value: object) -> bool:
    return isinstance(value, Mapping) and all(map(_is_schema, value.values()))


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return isinstance(value, int) or math.isfinite(value)  # which asks for a float: a whole number may be none


def _is_count(value: Any) -> bool:
    return _is_number(value) and 0 <= value < WHOLE and value == int(value)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _are_types(value: Any) -> bool:
    return value in TYPES if isinstance(value, str) else _are_names(value) and {*value} <= {*TYPES} and value != []


_Form = tuple[Callable[[Any], bool], str]
_SCHEMA: _Form = (_is_schema, "a schema")
_SCHEMAS: _Form = (_are_schemas, "a list of schemas")
_NAMED: _Form = (_named_schemas, "schemas by name")
_COUNT: _Form = (_is_count, "a whole number, 0 or more and below 2**63")
_NUMBER: _Form = (_is_number, "a number")
_TEXT: _Form = (_is_text, "a string")
_VALUES: _Form = (lambda value: isinstance(value, list) and value != [], "a list of values, one at least")

OF_TYPE: dict[str, dict[str, _Form]] = {
    "string": {"minLength": _COUNT, "maxLength": _COUNT, "pattern": _TEXT, "format": _TEXT},
    **dict.fromkeys(
        ("number", "integer"), dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _NUMBER)
    ),
    "array": {
        "prefixItems": _SCHEMAS,
        "items": (lambda value: _is_schema(value) or _are_schemas(value), "a schema"),
        **dict.fromkeys(("additionalItems", "unevaluatedItems"), _SCHEMA),
        **dict.fromkeys(("minItems", "maxItems"), _COUNT),
    },
    "object": {
        "properties": _NAMED,
        "patternProperties": _NAMED,
        "required": (_are_names, "a list of names"),
        **dict.fromkeys(("additionalProperties", "unevaluatedProperties", "propertyNames"), _SCHEMA),
        **dict.fromkeys(("minProperties", "maxProperties"), _COUNT),
    },
}
"""Keywords that hold for values of one type, with what each must be."""

_OTHERS: dict[str, _Form] = {
    "type": (_are_types, f"one of {', '.join(TYPES)}, or a list of these"),
    "enum": _VALUES,
    "const": (lambda value: True, ""),
    "$ref": _TEXT,
    **dict.fromkeys(("anyOf", "oneOf", "allOf"), _SCHEMAS),
}
FOLLOWED = _OTHERS | {name: form for forms in OF_TYPE.values() for name, form in forms.items()}


def check_keywords(schema: Mapping[str, Any]) -> None:
    """Check the keywords of a schema itself, not of those in it; NotFollowedError if no grammar can follow one."""
    for keyword, value in schema.items():
        if keyword in _NEVER_FOLLOWED:
            if value is not False:
                raise NotFollowedError(f"{keyword}")
        elif keyword in FOLLOWED:
            holds, must = FOLLOWED[keyword]
            if not holds(value):
                raise NotFollowedError(f"{keyword}={reprlib.repr(value)}, which must be {must},")
        elif keyword != "$id" and keyword not in _ANNOTATIONS and not str(keyword).startswith("x-"):
            raise NotFollowedError(f"an unknown keyword, {reprlib.repr(keyword)},")
