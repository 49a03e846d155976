"""Checks the form that a user gives, and makes the source of a grammar of it."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from compiled_llm.engine.grammars.forms.bounds import (
    check_json,
    check_length,
    check_parts,
    check_pattern,
    check_rules,
)
from compiled_llm.engine.grammars.forms.grammar_source import GrammarSource
from compiled_llm.engine.grammars.forms.json_schema import rewrite_schema, rewrite_tags, schema_text
from compiled_llm.requests.structured_outputs import FORMS, StructuredOutputsParams

_ANY_OBJECT = '{"type": "object"}'


def check_params(params: StructuredOutputsParams) -> dict[str, Any]:
    """Check a user's settings, and return immutable copies of the values that could change; ValueError, as theirs."""
    given = [name for name in FORMS if getattr(params, name) is not None]
    if len(given) != 1:
        raise ValueError(
            f"StructuredOutputsParams: {', '.join(given) or 'nothing'} given; give one of {', '.join(FORMS)}"
        )
    for name in ("disable_any_whitespace", "disable_additional_properties"):
        _check(params, name, isinstance(getattr(params, name), bool), "must be True or False")
    _check(params, "json_object", params.json_object in (None, True), "must be True, or None for another form")
    no_pattern = params.whitespace_pattern is None
    _check(params, "whitespace_pattern", no_pattern, "is not followed; give disable_any_whitespace=True")
    most = params.max_whitespace_cnt
    holds = most is None or (isinstance(most, int) and not isinstance(most, bool) and most >= 1)
    _check(params, "max_whitespace_cnt", holds, "must be 1 or more, or None for any number")
    (name,) = given
    try:
        return {name: _KEPT[name](getattr(params, name))}
    except ValueError as error:
        _check(params, name, False, str(error))
        raise


def source_of(params: StructuredOutputsParams) -> GrammarSource:
    """Return the source of the grammar of settings that have been checked."""
    free = not params.disable_any_whitespace
    if isinstance(params.json, str):
        return GrammarSource("json", rewrite_schema(params.json), free, params.max_whitespace_cnt)
    if params.regex is not None:
        return GrammarSource("regex", params.regex)
    if params.choice is not None:
        return GrammarSource("ebnf", _one_of(params.choice))
    if params.grammar is not None:
        return GrammarSource("ebnf" if "::=" in params.grammar else "lark", params.grammar)
    if isinstance(params.structural_tag, str):
        return GrammarSource("structural_tag", rewrite_tags(params.structural_tag))
    return GrammarSource("json", _ANY_OBJECT, free, params.max_whitespace_cnt)


def _check(params: StructuredOutputsParams, name: str, holds: bool, must: str) -> None:
    if not holds:
        raise ValueError(f"StructuredOutputsParams: {name}={reprlib.repr(getattr(params, name))} {must}")


def _text(check: Callable[[str], None]) -> Callable[[Any], str]:
    def kept(text: object) -> str:
        if not isinstance(text, str) or not text:
            raise ValueError("must be a string")
        check(text)
        return text

    return kept


def _texts(choice: object) -> tuple[str, ...]:
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
    rewrite_tags(text)
    return text


def _one_of(texts: Iterable[str]) -> str:
    """Return EBNF rules for one of several texts."""
    return "root ::= " + " | ".join(map(_literal, texts))


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


_KEPT: Mapping[str, Callable[[Any], Any]] = {
    "json": schema_text,
    "regex": _text(check_pattern),
    "choice": _texts,
    "grammar": _text(check_rules),
    "json_object": bool,
    "structural_tag": _tag_text,
}
"""Checks each form, and returns an immutable copy."""
