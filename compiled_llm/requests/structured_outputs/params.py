"""The user's settings for the form of an answer."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from compiled_llm.requests.structured_outputs.bounds import (
    check_json,
    check_length,
    check_parts,
    check_pattern,
    check_rules,
)
from compiled_llm.requests.structured_outputs.grammar_source import GrammarSource
from compiled_llm.requests.structured_outputs.json_schema import followed, followed_tags, schema_text

_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_ANY_OBJECT = '{"type": "object"}'

MAX_BLANKS = 32
"""Blanks between two parts of JSON, unless a user says otherwise: enough for deep indentation, and not for ever."""


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
        given = [name for name in _KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"StructuredOutputsParams: {', '.join(given) or 'nothing'} given; give one of {', '.join(_KINDS)}"
            )
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            self._check(name, isinstance(getattr(self, name), bool), "must be True or False")
        self._check("json_object", self.json_object in (None, True), "must be True, or None for another form")
        self._check(
            "whitespace_pattern", self.whitespace_pattern is None, "is not followed; give disable_any_whitespace=True"
        )
        most = self.max_whitespace_cnt
        holds = most is None or (isinstance(most, int) and not isinstance(most, bool) and most >= 1)
        self._check("max_whitespace_cnt", holds, "must be 1 or more, or None for any number")
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            self._check(name, value is None or (isinstance(value, str) and value != ""), "must be a string")
        self._keep("regex", _pattern)
        self._keep("grammar", _rules)
        self._keep("choice", _texts)
        self._keep("json", schema_text)
        self._keep("structural_tag", _tag_text)

    @property
    def source(self) -> GrammarSource:
        """The source of its grammar."""
        free = not self.disable_any_whitespace
        if isinstance(self.json, str):
            return GrammarSource("json", followed(self.json), free, self.max_whitespace_cnt)
        if self.regex is not None:
            return GrammarSource("regex", self.regex)
        if self.choice is not None:
            return GrammarSource("ebnf", _one_of(self.choice))
        if self.grammar is not None:
            return GrammarSource("ebnf" if "::=" in self.grammar else "lark", self.grammar)
        if isinstance(self.structural_tag, str):
            return GrammarSource("structural_tag", followed_tags(self.structural_tag))
        return GrammarSource("json", _ANY_OBJECT, free, self.max_whitespace_cnt)

    @property
    def name(self) -> str:
        """The name of the field that is given."""
        return next(name for name in _KINDS if getattr(self, name) is not None)

    def _keep(self, name: str, kept: Callable[[Any], Any]) -> None:
        """Keep an immutable copy of a value."""
        value = getattr(self, name)
        if value is None:
            return
        try:
            object.__setattr__(self, name, kept(value))
        except ValueError as error:
            self._check(name, False, str(error))

    def _check(self, name: str, holds: bool, must: str) -> None:
        if not holds:
            raise ValueError(f"StructuredOutputsParams: {name}={reprlib.repr(getattr(self, name))} {must}")


def _pattern(pattern: str) -> str:
    check_pattern(pattern)
    return pattern


def _rules(rules: str) -> str:
    check_rules(rules)
    return rules


def _texts(choice: Any) -> tuple[str, ...]:
    texts = () if isinstance(choice, (str, Mapping)) or not isinstance(choice, Iterable) else tuple(choice)
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise ValueError("must be texts, one at least, none of them empty")
    check_length(_one_of(texts))
    return texts


def _tag_text(tag: Any) -> str:
    text = tag.model_dump_json() if hasattr(tag, "model_dump_json") else tag
    if isinstance(text, str):
        check_json(text)
    try:
        found = json.loads(text) if isinstance(text, str) else text
        if not isinstance(found, Mapping):
            raise ValueError("must be a structural tag: a dict, its JSON, or an object of xgrammar's")
        check_parts(found)
        text = json.dumps(found)
    except (TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"is no JSON: {error}") from error
    check_length(text)
    followed_tags(text)
    return text


def _one_of(texts: Iterable[str]) -> str:
    """Return EBNF rules for one of several texts."""
    return "root ::= " + " | ".join(map(_literal, texts))


def _literal(text: str) -> str:
    """Return a text as a literal of EBNF."""
    return json.dumps(text, ensure_ascii=False)
