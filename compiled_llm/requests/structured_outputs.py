"""The user's settings for the form of an answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from compiled_llm.features import Seam, needed

FORMS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")

MAX_BLANKS = 32
"""Blanks between two parts of JSON, unless a user says otherwise: enough for deep indentation, and not for ever."""


class GrammarsMissingError(RuntimeError):
    """The lack of a library that compiles grammars."""


class FormSource(Protocol):
    """The source of a grammar."""

    @property
    def kind(self) -> str: ...
    @property
    def text(self) -> str: ...


class FormsPart(Protocol):
    """The part that knows forms of answers."""

    def check_params(self, params: StructuredOutputsParams) -> Mapping[str, Any]:
        """Check settings, and return immutable copies of the values that could change; ValueError as theirs."""
        ...

    def source_of(self, params: StructuredOutputsParams) -> FormSource: ...


_FORMS = Seam[FormsPart]("structured_outputs", "engine")


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """The form that an answer has; names and defaults are vLLM's. Exactly one of the first six is given.

    Attributes:
        json: a JSON schema that the answer follows: a dict, its JSON, or a model class of pydantic's; kept as JSON.
            Properties that the schema does not name are written only if it says ``additionalProperties``.
        regex: a regular expression that the whole answer matches.
        choice: texts, one of which the answer is.
        grammar: rules in EBNF, as llama.cpp and xgrammar have them, the first one called ``root``; or Lark's, the first
            one called ``start``.
        json_object: True for any JSON object.
        structural_tag: forms of the parts between tags, as xgrammar's structural tags: a dict, its JSON, or an object
            of xgrammar's; kept as JSON.
        disable_any_whitespace: JSON has one space after ``,`` and ``:``, and no other whitespace.
        disable_additional_properties: accepted for vLLM's sake: see ``json``.
        whitespace_pattern: None; xgrammar, which vLLM uses by default, does not follow one either.
        max_whitespace_cnt: how many blanks JSON has between two parts at most, as xgrammar calls it; None for any
            number, which small models may write until ``max_tokens``.

    Raises:
        ValueError: none or several forms are given, or the given one is impossible or too large.
    """

    json: str | Mapping[str, Any] | type | None = None
    regex: str | None = None
    choice: Iterable[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    max_whitespace_cnt: int | None = MAX_BLANKS

    def __post_init__(self) -> None:
        for name, value in needed(_FORMS).check_params(self).items():
            object.__setattr__(self, name, value)

    @property
    def source(self) -> FormSource:
        """The source of its grammar."""
        return needed(_FORMS).source_of(self)

    @property
    def name(self) -> str:
        """The name of the form that is given."""
        return next(name for name in FORMS if getattr(self, name) is not None)
