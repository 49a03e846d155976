"""JSON schemas at random, and texts that a grammar takes, at random."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import xgrammar as xgr
from hypothesis import strategies as st

_SIGNS = '{}[]",: -.+0123456789eEabcdfknrstuxyzA\\/_\n'
_TOKENS = ["<end>", *_SIGNS, "é", "漢", "true", "false", "null", '":', "\\u00", "\\n"]
_INFO = xgr.TokenizerInfo(_TOKENS, stop_token_ids=[0])
_ENDING = [_TOKENS.index(sign) for sign in ("<end>", '"', "}", "]", "1", "a", "b", "x", "null")]
_COMPILER = xgr.GrammarCompiler(_INFO, max_threads=1, cache_enabled=False)
_SOON, _LATEST = 40, 300
"""Tokens after which a walk ends when it can, and after which it is given up."""

NAMES = ("a", "b", "x1", "k")
PATTERNS = ("^[ab]+$", "a", "^x[0-9]*$", "^(a|b\\n)$", "[^a]", "^\\w{1,3}$", '"', "^.{0,3}$", "\\\\")
VALUES = (None, True, 0, 1, 1.5, "a", "ab", 'x"\n', [], [1], {}, {"a": 1})

_few = st.integers(0, 4)
_bounds = st.one_of(st.integers(-20, 120), st.sampled_from((-1.5, 0.25, 2.5, 10.0)))


def _some(keywords: dict[str, st.SearchStrategy[Any]], most: int = 3) -> st.SearchStrategy[dict[str, Any]]:
    """A few of the keywords, with a value each."""
    chosen = st.lists(st.sampled_from(sorted(keywords)), max_size=most, unique=True)
    return chosen.flatmap(lambda names: st.fixed_dictionaries({name: keywords[name] for name in names}))


def _keywords(inner: st.SearchStrategy[Any]) -> dict[str, st.SearchStrategy[Any]]:
    named = st.dictionaries(st.sampled_from(NAMES), inner, max_size=3)
    types = st.sampled_from(("object", "array", "string", "number", "integer", "boolean", "null"))
    parts = st.lists(inner, min_size=1, max_size=3)
    return {
        "type": st.one_of(types, st.lists(types, min_size=1, max_size=3, unique=True)),
        "enum": st.lists(st.sampled_from(VALUES), min_size=1, max_size=4),
        "const": st.sampled_from(VALUES),
        "$ref": st.sampled_from(("#", "#/$defs/d", "#/$defs/e")),
        **dict.fromkeys(("anyOf", "oneOf", "allOf", "prefixItems"), parts),
        **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _few),
        **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _bounds),
        "pattern": st.sampled_from(PATTERNS),
        "properties": named,
        "required": st.lists(st.sampled_from(NAMES), max_size=2, unique=True),
        "patternProperties": st.dictionaries(st.sampled_from(PATTERNS), inner, max_size=2),
        **dict.fromkeys(("items", "additionalProperties", "propertyNames", "unevaluatedProperties"), inner),
        "unevaluatedItems": inner,
        "title": st.just("a title"),
    }


def _several(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keywords = _keywords(inner)
    common = _some({name: keywords[name] for name in ("type", "properties", "required", "anyOf", "allOf", "oneOf")})
    return st.one_of(_some(keywords), st.builds(lambda one, other: one | other, _some(keywords, 2), common))


_plain = st.one_of(st.booleans(), _some({n: s for n, s in _keywords(st.booleans()).items() if n != "$ref"}))
_nested = st.recursive(_plain, _several, max_leaves=6)


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    """Schemas of any keywords that may be followed, beside each other and inside one another."""
    definitions = st.fixed_dictionaries({"d": _nested, "e": _nested})
    return st.builds(lambda schema, defs: {**schema, "$defs": defs}, _several(_nested), definitions)


def text_of(source: Any, rng: random.Random) -> str | None:
    """Return a text that a grammar takes; None if a walk through it does not end soon."""
    matcher = xgr.GrammarMatcher(source.compiled(_COMPILER))
    mask = np.zeros((1, -(-len(_TOKENS) // 32)), dtype=np.int32)
    found: list[str] = []
    while len(found) < _LATEST:
        matcher.fill_next_token_bitmask(mask)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(_TOKENS)]
        allowed = [int(token) for token in np.flatnonzero(bits)]
        if not allowed:
            return None
        ending = [token for token in _ENDING if token in allowed]
        token = ending[0] if ending and len(found) > _SOON else rng.choice(allowed)
        if 0 in allowed and rng.random() < 0.5:
            token = 0
        assert matcher.accept_token(token)
        if token == 0:
            return "".join(found)
        found.append(_TOKENS[token])
    return None
