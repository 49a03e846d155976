"""JSON schemas as users give them, and as grammars follow them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from compiled_llm.engine.grammars.forms.bounds import check_json, check_length, check_parts
from compiled_llm.engine.grammars.forms.rewriting import rewrite

_SCHEMAS_OF_TAGS = ("json_schema", "schema")
"""Keys of structural tags, of the present kind and of the older one, whose values are schemas."""


def schema_text(schema: Any) -> str:
    """Return a schema (a mapping, JSON, or pydantic's class) as JSON; ValueError says what no grammar can follow."""
    found = _parsed(schema)
    if not isinstance(found, Mapping):
        raise ValueError("must be a JSON schema: a dict, its JSON, or a model class of pydantic's")
    check_parts(found)
    try:
        text = json.dumps(found)
    except TypeError as error:
        raise ValueError(f"is no JSON: {error}") from error
    check_length(text)
    rewrite_schema(text)
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


@lru_cache(maxsize=256)
def rewrite_schema(text: str) -> str:
    """Return a schema (JSON) in the words that grammars follow; ValueError if there are none, as of ``rewrite``."""
    # Cached, since many requests have the same one, and each is asked for several times.
    found = json.dumps(_rewrite(json.loads(text), for_json=True))
    check_length(found)
    return found


@lru_cache(maxsize=256)
def rewrite_tags(text: str) -> str:
    """Return structural tags, as JSON, with their schemas in the words that grammars follow."""
    found = json.dumps(_tags(json.loads(text)))
    check_length(found)
    return found


def _tags(tag: Any) -> Any:
    if isinstance(tag, list):
        return [_tags(part) for part in tag]
    if not isinstance(tag, Mapping):
        return tag
    for_json = tag.get("style", "json") == "json"
    return {
        name: _rewrite(part, for_json)
        if name in _SCHEMAS_OF_TAGS and isinstance(part, (Mapping, bool))
        else _tags(part)
        for name, part in tag.items()
    }


def _rewrite(schema: Any, for_json: bool) -> Any:
    try:
        return rewrite(schema, for_json)
    except RecursionError as error:
        raise ValueError("has too many schemas inside one another") from error
