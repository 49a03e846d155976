"""Fields of a request that say which form an answer has besides ``response_format``: vLLM's, and SGLang's."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from compiled_llm.requests.structured_outputs import MAX_BLANKS, StructuredOutputsParams
from compiled_llm.server.http.api_error import invalid
from compiled_llm.server.openai.fields.fields import Body, NoEffect, RefusedField
from compiled_llm.server.openai.fields.response_format import MAX_SCHEMA, AnyFormat, Form, form_of

_OLDER_NAMES = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "structural_tag": "structural_tag",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
}
"""Their former names in vLLM, and their names in SGLang."""
_NOT_FOLLOWED = RefusedField("no grammar follows it; give structured_outputs.max_whitespace_cnt")
_Choice = Annotated[list[str], Field(max_length=4096, fail_fast=True)]


class StructuredOutputs(Body):
    """A form, and how much white space JSON may have; that counts with ``response_format``, too."""

    json_: str | dict[str, Any] | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: _Choice | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    max_whitespace_cnt: Annotated[int | None, Field(ge=1)] = None
    whitespace_pattern: Annotated[Any, _NOT_FOLLOWED] = None

    @property
    def blanks(self) -> dict[str, Any]:
        """The bounds of white space; null is a bound, too: none."""
        said: dict[str, Any] = {"disable_any_whitespace": bool(self.disable_any_whitespace)}
        return said | ({"max_whitespace_cnt": self.max_whitespace_cnt} if self._says("max_whitespace_cnt") else {})

    def _says(self, name: str) -> bool:
        return name in self.model_fields_set

    @property
    def forms(self) -> dict[str, Any]:
        """The forms that are given, by name; one at most should be."""
        given = self.model_dump(by_alias=True, include={"json_", *_OLDER_NAMES.values(), "json_object"})
        return {name: value for name, value in given.items() if value not in (None, False)}


class FormFields(Body):
    """Fields of every kind of request for the form of its answer."""

    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: _Choice | None = None
    guided_grammar: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    guided_decoding_backend: Annotated[str | None, NoEffect("xgrammar compiles all forms")] = None
    guided_whitespace_pattern: Annotated[Any, _NOT_FOLLOWED] = None

    @property
    def max_blanks(self) -> int | None:
        """How many blanks JSON may have in a row; None for any number."""
        said = {} if self.structured_outputs is None else self.structured_outputs.blanks
        most: int | None = said.get("max_whitespace_cnt", MAX_BLANKS)
        return most

    def form_beside(self, wanted: AnyFormat | None, field: str = "response_format") -> Form | None:
        """Return the form of an answer, ``wanted`` by its ``field`` or by one of these; None for any text.

        Raises:
            ApiError: there are several forms, or one is too long.
            ValueError: there is no such form.
        """
        said = self.structured_outputs
        forms = [] if said is None else [("structured_outputs", {name: value}) for name, value in said.forms.items()]
        older = [(old, name, getattr(self, old)) for old, name in _OLDER_NAMES.items()]
        forms += [(old, {name: value}) for old, name, value in older if value is not None]
        if (plain := form_of(wanted)) is not None:
            forms.append((field, plain))
        if len(forms) > 1:
            names = ", ".join(dict.fromkeys(name for name, _ in forms))
            raise invalid(f"{forms[0][0]}: an answer has one form, and there are several, in {names}", forms[0][0])
        if not forms:
            return None
        return _short(named_form(forms[0][0], **forms[0][1], **(said or StructuredOutputs()).blanks))


def named_form(field: str, **form: Any) -> Form:
    """Return a form, as of ``StructuredOutputsParams``, whose errors name the field that the client has sent."""
    try:
        return Form(field, StructuredOutputsParams(**form))
    except ValueError as error:
        raise ValueError(f"{field}: {str(error).removeprefix('StructuredOutputsParams: ')}") from error


def _short(form: Form) -> Form:
    given = getattr(form.params, form.params.name)
    length = len(given if isinstance(given, str) else form.params.source.text)
    if length > MAX_SCHEMA:
        raise invalid(f"{form.field}: the schema has {length:,} characters; at most {MAX_SCHEMA:,}", form.field)
    return form
