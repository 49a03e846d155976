"""The form of an answer, as OpenAI's ``response_format`` says it."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field

from compiled_llm.engine.structured_outputs import StructuredOutputsParams
from compiled_llm.server.front.api_error import invalid
from compiled_llm.server.front.fields import Body, NoEffect

MOST_SCHEMA = 2**16
"""Characters of a schema: it takes time to compile."""
_PARAM = "response_format"


class TextFormat(Body):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Body):
    """Any JSON object."""

    type: Literal["json_object"]


class NamedSchema(Body):
    """A JSON schema."""

    name: Annotated[str | None, NoEffect("the model does not see it")] = None
    description: Annotated[str | None, NoEffect("the model does not see it")] = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: Annotated[bool | None, NoEffect("the schema is always followed")] = None


class JsonSchemaFormat(Body):
    """What a JSON schema describes."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


AnyFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat
ResponseFormat = Annotated[AnyFormat, Field(discriminator="type")]


def schema_of(wanted: AnyFormat | None) -> dict[str, Any] | None:
    """Return the JSON schema that a form comes to; None for any text."""
    if isinstance(wanted, JsonSchemaFormat):
        return wanted.json_schema.schema_
    return {"type": "object"} if isinstance(wanted, JsonObjectFormat) else None


def form_of(wanted: AnyFormat | None) -> dict[str, Any]:
    """Return the settings of ``SamplingParams`` for a form.

    Raises:
        ApiError: the schema is too long.
        ValueError: there is no such form.
    """
    if wanted is None or isinstance(wanted, TextFormat):
        return {}
    if isinstance(wanted, JsonObjectFormat):
        return {"structured_outputs": StructuredOutputsParams(json_object=True)}
    schema = json.dumps(wanted.json_schema.schema_)
    if len(schema) > MOST_SCHEMA:
        raise invalid(f"response_format: the schema has {len(schema):,} characters; at most {MOST_SCHEMA:,}", _PARAM)
    return {"structured_outputs": StructuredOutputsParams(json=schema)}
