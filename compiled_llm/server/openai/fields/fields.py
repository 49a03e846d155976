"""Request fields that are accepted and ignored, and fields that are rejected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

T = TypeVar("T")
Entries = Annotated[list[T], Field(fail_fast=True)]
"""A list whose first wrong entry ends it: the others would take an error each, of a thousand bytes and more."""


class Body(BaseModel):
    """JSON with the declared fields alone, each of its own type."""

    model_config = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True)
class NoEffect:
    """A field that is accepted and ignored, since it cannot change the answer: ``why`` not."""

    why: str


@dataclass(frozen=True)
class RefusedField:
    """A field that is not served: only values that ask for nothing are accepted."""

    why: str  # it is not served, or what to give in its place
    neutral: tuple[Any, ...] = ()  # values besides null that ask for nothing

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._checked)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"enum": [None, *self.neutral], "description": f"Not served: {self.why}."}

    def _checked(self, value: object) -> Any:
        if value is None or any(value == known and type(value) is type(known) for known in self.neutral):
            return value
        raise PydanticCustomError("value_error", "is not served: {why}", {"why": self.why, "code": "unsupported_value"})
