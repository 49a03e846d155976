"""The form of an answer, as OpenAI's ``response_format`` says it."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from compiled_llm.requests.structured_outputs import StructuredOutputsParams
from compiled_llm.server.openai.fields.fields import Body, NoEffect

MAX_SCHEMA = 2**16  # characters of a schema: it takes time to compile


class Form(NamedTuple):
    """The form of an answer, and the field of the request, or the several fields, that ask for it."""

    field: str
    params: StructuredOutputsParams

    @property
    def named(self) -> dict[str, str]:
        """The field by the engine's name for it, with which errors of the engine begin."""
        return {"structured_outputs": self.field}


class PlainTextFormat(Body):
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
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class StructuralTagFormat(Body):
    """Forms of the parts between tags: xgrammar's ``format``, or its former ``structures`` and ``triggers``."""

    type: Literal["structural_tag"]
    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None


AnyFormat = PlainTextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat
ResponseFormat = Annotated[AnyFormat, Field(discriminator="type")]


def form_of(wanted: AnyFormat | None) -> dict[str, Any] | None:
    """Return a form as arguments of ``StructuredOutputsParams``; None for any text."""
    if isinstance(wanted, JsonObjectFormat):
        return {"json_object": True}
    if isinstance(wanted, JsonSchemaFormat):
        return {"json": wanted.json_schema.schema_}
    if isinstance(wanted, StructuralTagFormat):
        return {"structural_tag": wanted.model_dump(exclude_none=True)}
    return None
