"""What the grammar of a JSON schema takes is valid by ``jsonschema``; what it cannot follow is refused by name."""

import datetime
import enum
import functools
import json
import random
import re
import reprlib
import uuid
from typing import Annotated, Any, Literal, Optional

import hypothesis
import numpy as np
import pydantic
import pytest
from hypothesis import strategies as st

from compiled_llm.engine.grammars.forms.grammar_source import GrammarSource
from compiled_llm.requests.structured_outputs import StructuredOutputsParams

jsonschema = pytest.importorskip("jsonschema")
xgr = pytest.importorskip("xgrammar")

from xgrammar import testing  # noqa: E402

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


def assert_followed(schema: dict[str, Any], seed: int, walks: int = 4) -> int:
    """Return how many texts of the schema's grammar were valid; none if the schema is refused."""
    try:
        source = StructuredOutputsParams(json=schema).source
    except ValueError:
        return 0
    validator, rng = jsonschema.Draft202012Validator(schema), random.Random(seed)
    try:
        texts = [text_of(source, rng) for _ in range(walks)]
    except RuntimeError as error:
        raise AssertionError(f"{schema} is no grammar: {error}") from error
    for text in filter(None, texts):
        wrong = list(validator.iter_errors(json.loads(text)))
        assert not wrong, f"{text} does not follow {schema}: {wrong[0].message}"
    return sum(text is not None for text in texts)


@hypothesis.given(schemas(), st.integers(0, 2**32))
def test_what_a_grammar_takes_is_valid(schema, seed):
    assert_followed(schema, seed)


# ---- schemas as OpenAI's strict mode and pydantic write them


class Colour(str, enum.Enum):
    red = "red"
    blue = "blue"


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: Annotated[int, pydantic.Field(ge=0, le=9)]


class Dog(pydantic.BaseModel):
    kind: Literal["dog"] = "dog"
    tricks: list[str] = []


class Node(pydantic.BaseModel):
    value: int
    next: Optional["Node"] = None


class Order(pydantic.BaseModel):
    """An order, with everything that classes of pydantic's commonly have."""

    model_config = pydantic.ConfigDict(extra="forbid", title="An order", json_schema_extra={"x-of": "shop"})

    name: Annotated[str, pydantic.Field(min_length=1, max_length=200, description="Whose", examples=["Ada"])]
    code: Annotated[str, pydantic.Field(pattern=r"^[A-Z]{2}-\d{3,5}$")]
    slug: Annotated[str, pydantic.Field(pattern=r"^[a-z][a-z0-9_]*$", max_length=30)]
    note: Annotated[str, pydantic.Field(max_length=2000)] | None = None
    colour: Colour = Colour.red
    size: Literal["s", "m", 40] = "m"
    price: Annotated[float, pydantic.Field(gt=0, lt=1e6)]
    count: pydantic.PositiveInt
    day: datetime.date
    at: datetime.datetime | None = None
    id: uuid.UUID
    mail: Annotated[str, pydantic.Field(json_schema_extra={"format": "email"})]
    pet: Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]
    either: int | str | list[int]
    pair: tuple[int, str]
    many: Annotated[list[Node], pydantic.Field(min_length=1, max_length=3)]
    by_name: dict[str, int]
    by_colour: dict[Colour, bool]
    by_code: dict[Annotated[str, pydantic.Field(pattern="^k[0-9]+$")], float]
    short: dict[Annotated[str, pydantic.Field(max_length=3)], None]
    anything: Any = None
    object: dict[str, Any] = {}


ORDER: dict[str, Any] = {
    "name": 'Ada "the first"\nLovelace',
    "code": "AB-123",
    "slug": "a_b1",
    "note": "print(1)\nprint(2)\n" * 60,
    "colour": "blue",
    "size": 40,
    "price": 2.5,
    "count": 3,
    "day": "2026-11-28",
    "at": "2026-11-28T12:00:00Z",
    "id": "123e4567-e89b-12d3-a456-426614174000",
    "mail": "ada@example.org",
    "pet": {"kind": "dog", "tricks": ["sit", "é"]},
    "either": [1, 2],
    "pair": [1, "x"],
    "many": [{"value": 1, "next": {"value": 2, "next": None}}],
    "by_name": {"a": 1, "ü\n": -2},
    "by_colour": {"red": True},
    "by_code": {"k12": 0.5},
    "short": {"ab\\": None},
    "anything": [None, {"x": 1e5}],
    "object": {"a": [True]},
}
STRICT: dict[str, Any] = {  # with what OpenAI's guide shows
    "type": "object",
    "title": "Steps",
    "$defs": {
        "step": {
            "type": "object",
            "properties": {"text": {"type": "string", "description": "what"}, "output": {"type": ["string", "null"]}},
            "required": ["text", "output"],
            "additionalProperties": False,
        },
        "list": {
            "type": "object",
            "properties": {
                "value": {"type": "number", "minimum": -10, "exclusiveMaximum": 10},
                "next": {"anyOf": [{"$ref": "#/$defs/list"}, {"type": "null"}]},
            },
            "required": ["value", "next"],
            "additionalProperties": False,
        },
    },
    "properties": {
        "steps": {"type": "array", "items": {"$ref": "#/$defs/step"}, "minItems": 1, "maxItems": 5},
        "list": {"$ref": "#/$defs/list", "description": "a list"},
        "self": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        "unit": {"type": "string", "enum": ["C", "F"], "description": "of the temperature"},
        "name": {"type": "string", "pattern": "^@[a-zA-Z0-9_]+$"},
        "when": {"type": "string", "format": "date-time"},
    },
    "required": ["steps", "list", "self", "unit", "name", "when"],
    "additionalProperties": False,
}
STEPS: dict[str, Any] = {
    "steps": [{"text": "a", "output": None}, {"text": '"', "output": "b\n"}],
    "list": {"value": 9.5, "next": {"value": -10, "next": None}},
    "self": None,
    "unit": "F",
    "name": "@a_1",
    "when": "2026-11-28T12:00:00+01:00",
}


@functools.lru_cache(maxsize=4)
def matcher_of(source: GrammarSource) -> Any:
    return testing._get_matcher_from_grammar(source.read())


def takes(schema: Any, text: str) -> bool:
    """Whether the grammar of a schema takes a text."""
    matcher = matcher_of(StructuredOutputsParams(json=schema).source).fork()
    return bool(matcher.accept_string(text) and matcher.is_completed())


@pytest.mark.parametrize(("schema", "value"), [(Order, ORDER), (STRICT, STEPS)], ids=["pydantic", "strict"])
def test_schemas_as_pydantic_and_openai_write_them_are_served(schema, value):
    if schema is Order:
        Order.model_validate_json(json.dumps(value))
    assert takes(schema, json.dumps(value))
    assert takes(schema, json.dumps(value, ensure_ascii=False, indent=2))
    plain = Order.model_json_schema() if schema is Order else schema
    assert assert_followed(plain, seed=0, walks=2) >= 0
    for name in plain["required"]:
        assert not takes(schema, json.dumps({other: each for other, each in value.items() if other != name})), name


WRONG_ORDERS = {
    "name": ["", "x" * 201, 5],
    "code": ["AB-12", "xAB-123", "AB-123\n"],
    "slug": ["a" * 31, "A"],
    "note": ["x" * 2001],
    "size": ["l", 41],
    "price": [0, 1e6, "1"],
    "count": [0, 1.5],
    "pet": [{"tricks": []}, {"kind": "cat"}, {"kind": "cat", "lives": 10}, {"kind": "dog", "lives": 3}],
    "pair": [[1], [1, "x", 2]],
    "many": [[], [{"value": 1}] * 4],
    "by_colour": [{"green": True}],
    "by_code": [{"x": 1}],
    "short": [{"abcd": None}],
}


@pytest.mark.parametrize("name", WRONG_ORDERS)
def test_a_wrong_part_of_a_class_of_pydantics_is_not_written(name):
    for wrong in WRONG_ORDERS[name]:
        assert not takes(Order, json.dumps(ORDER | {name: wrong})), wrong


# ---- keywords beside each other

A, B = {"properties": {"a": {"type": "null"}}}, {"properties": {"b": {"type": "null"}}, "required": ["b"]}
OBJECT = {"type": "object"}
BESIDE: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "properties beside anyOf": (
        OBJECT | A | {"anyOf": [{"required": ["a"]}, B]},
        ['{"a": null}', '{"b": null}', '{"a": null, "b": null}'],
        ["{}", '{"a": 1, "b": null}', "1"],
    ),
    "beside $ref": ({"$ref": "#/$defs/x", "maxLength": 2, "$defs": {"x": {"type": "string"}}}, ['"ab"'], ['"abc"']),
    "enum beside type": ({"enum": ["a", 5, None], "type": ["string", "null"]}, ['"a"', "null"], ["5"]),
    "enum beside bounds": ({"enum": [1, 5, 9], "minimum": 2, "maximum": 5}, ["5"], ["1", "9"]),
    "const beside enum": ({"const": 1, "enum": [1, 2]}, ["1"], ["2"]),
    "allOf": ({"allOf": [OBJECT | A | {"required": ["a"]}, B]}, ['{"a": null, "b": null}'], ['{"a": null}']),
    "allOf beside bounds": ({"type": "integer", "allOf": [{"minimum": 3}, {"maximum": 4}]}, ["3", "4"], ["2", "5"]),
    "oneOf beside properties": (
        OBJECT | A | {"oneOf": [{"required": ["a"]}, B | {"properties": {"b": {}, "a": False}}]},
        ['{"a": null}', '{"b": 1}'],
        ["{}", '{"a": null, "b": null}'],
    ),
    "pattern beside length": ({"type": "string", "pattern": "^a+$", "maxLength": 3}, ['"aaa"'], ['"aaaa"', '"b"']),
    "a required name": (OBJECT | {"required": ["z"]}, ['{"z": [1]}'], ["{}", '{"y": 1}']),
    "a required name of other properties": (
        OBJECT | A | {"required": ["z"], "additionalProperties": {"type": "integer"}},
        ['{"z": 1}', '{"a": null, "z": 1}', '{"a": null, "z": 1, "y": 2}'],
        ['{"a": null}', '{"z": null}'],
    ),
    "minimum without type": ({"minimum": 3}, ["3", '"a"', "null", "[]", "{}"], ["2", "2.9"]),
    "minLength without type": ({"minLength": 2}, ['"ab"', "1"], ['"a"']),
    "required without type": ({"required": ["a"]}, ['{"a": 1}', "5"], ["{}"]),
    "properties without type": (A, ['{"a": null}', "{}"], ["5", '{"a": 1}']),
    "additionalProperties beside properties": (
        OBJECT | A | {"additionalProperties": {"type": "integer"}},
        ['{"a": null, "b": 1}', '{"": 1}', '{"aa": 1}'],
        ['{"a": 1}', r'{"\u0061": 1}', '{"b": null}'],
    ),
    "propertyNames beside properties": (
        OBJECT | B | {"propertyNames": {"pattern": "^b"}} | {},
        ['{"b": null}'],
        ["{}"],
    ),
    "propertyNames that bar one": (
        OBJECT | {"properties": {"a": {}, "b": {}}, "propertyNames": {"enum": ["b"]}},
        ['{"b": 1}', "{}"],
        ['{"a": 1}'],
    ),
    "an integer between fractions": ({"type": "integer", "minimum": 2.5, "exclusiveMaximum": 4}, ["3"], ["2", "4"]),
    "items without type": ({"items": {"type": "null"}, "minItems": 1}, ["[null]"], ["[]", "[1]"]),
    "false": (OBJECT | {"properties": {"a": False, "b": True}}, ['{"b": 1}', "{}"], ['{"a": 1}']),
    "minItems alone": ({"type": "array", "minItems": 2}, ["[1, 2]"], ["[1]"]),
    "an array as drafts had it": (
        {"type": "array", "items": [{"type": "null"}], "additionalItems": {"type": "integer"}},
        ["[]", "[null]", "[null, 1]"],
        ["[1]", "[null, null]"],
    ),
}


@pytest.mark.parametrize("name", BESIDE)
def test_keywords_beside_each_other_all_hold(name):
    schema, good, bad = BESIDE[name]
    assert [text for text in good if not takes(schema, text)] == []
    assert [text for text in bad if takes(schema, text)] == []


NOT_FOLLOWED: list[tuple[dict[str, Any], str]] = [
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf of which several may hold (anyOf is followed) at #"),
    ({"type": "string", "pattern": "a", "format": "date"}, "format beside pattern, minLength or maxLength at #"),
    ({"items": {"$dynamicRef": "#a"}}, "$dynamicRef at #/items"),
    ({"$ref": "#a", "$defs": {"x": {"$anchor": "a"}}}, "$ref to '#a', which leads nowhere, at #"),
    (OBJECT | A | {"patternProperties": {"^a": {}}}, "patternProperties that match a name in properties at #"),
    (OBJECT | {"patternProperties": {"^a": {}, "b": {}}}, "patternProperties beside others, "),
    (OBJECT | {"minProperties": 2, "additionalProperties": {}}, "minProperties beside names that are free, and may"),
    (OBJECT | {"minproperties": 2}, "an unknown keyword, 'minproperties', at #"),
    ({"allOf": 5}, "allOf=5, which must be a list of schemas, at #"),
    ({"properties": {"a": 5}}, "properties={'a': 5}, which must be schemas by name, at #"),
    ({"required": "a"}, "required='a', which must be a list of names, at #"),
    ({"type": "objectt"}, "type='objectt', which must be one of object, array, "),
    ({"minimum": "1"}, "minimum='1', which must be a number, at #"),
    ({"type": "number", "minimum": 1e-9}, "minimum=1e-09, a bound with too many digits, at #"),
    *(
        ({"type": kind, name: bound}, f"{name}={reprlib.repr(bound)}, {said}, at #")
        for bound in (10**308, 10**309, 10**4000)
        for kind, name, said in [
            ("integer", "minimum", "a bound with too many digits"),
            ("number", "exclusiveMaximum", "a bound with too many digits"),
            ("string", "maxLength", "which must be a whole number, 0 or more and below 2**63"),
            ("array", "minItems", "which must be a whole number, 0 or more and below 2**63"),
            ("object", "maxProperties", "which must be a whole number, 0 or more and below 2**63"),
        ]
    ),
    ({"const": 2**70}, "a number with too many digits, at #"),
    ({"anyOf": [{"$ref": "#"}, {}], "maximum": 1}, "a $ref into itself, beside other keywords, at #"),
    ({"pattern": r"^\p{L}$"}, r"a pattern with the escape \p at character 3 at #"),
    ({"pattern": "(?=a)"}, "a pattern with a lookaround or a flag, (?...), at character 2 at #"),
    ({"pattern": "a(b"}, "a pattern with a parenthesis that is not closed at character 3 at #"),
    ({"pattern": "a*b*", "maxLength": 3}, "a pattern beside minLength or maxLength, of which several parts vary in"),
    ({"pattern": "(a{1000}){1000}"}, "a pattern that repeats so much that it unfolds to more than 8,192 characters"),
]


@pytest.mark.parametrize(("schema", "message"), NOT_FOLLOWED, ids=lambda value: str(value)[:40])
def test_what_cannot_be_followed_is_refused_by_name_and_place(schema, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        StructuredOutputsParams(json=schema)
    assert re.match(r"StructuredOutputsParams: json=.* has ", str(caught.value))


@pytest.mark.parametrize(
    "schema", [{"const": 5, "type": "string"}, OBJECT | {"properties": {"a": False}, "required": ["a"]}]
)
def test_a_schema_without_values_is_refused(schema):
    with pytest.raises(ValueError, match="has no value that follows it"):
        StructuredOutputsParams(json=schema)


# ---- strings

CODE = 'print(1)\nprint("2")\t\\ é 漢 😀'
STRINGS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "maxLength": ({"maxLength": len(CODE)}, [CODE], [CODE + "x"]),
    "minLength": ({"minLength": 3}, ["\n\t\\", "😀😀😀"], ["\n\t", "😀😀"]),
    "in blocks": ({"minLength": 100, "maxLength": 300}, ["\n" * 100, "a\\é" * 100], ["\n" * 99, "a\\é" * 100 + '"']),
    "in many blocks": ({"maxLength": 10_000}, ["\n" * 10_000], ["\n" * 10_001]),
    "at least": ({"minLength": 200}, ["\n" * 200, '"' * 1000], ["\n" * 199]),
    "a block exactly": ({"minLength": 64, "maxLength": 128}, ["\n" * 64, "\n" * 128], ["\n" * 63, "\n" * 129]),
    "any character": ({"pattern": r"^print[\s\S]*$"}, [CODE], ["x" + CODE]),
    "a line end": ({"pattern": r"^(a|\n)*$"}, ["a\n\na", ""], ["b", "\\n"]),
    "a quote": ({"pattern": '^"[^"]*"$'}, ['"a\nb"', '""'], ['"""', "a"]),
    "a backslash": ({"pattern": r"^C:\\\w+$"}, ["C:\\temp"], ["C:temp", "C:\\\\temp"]),
    "no line end": ({"pattern": "^.*$"}, ['a\t"'], ["a\n"]),
    "a long repeat": ({"pattern": "^[a-c]{2,500}$"}, ["ab", "abc" * 100], ["a", "a" * 501]),
    "outside of ASCII": ({"pattern": "^[à-ü]{2}[^ß]$"}, ["éüx"], ["ééß", "eéx"]),
}


@pytest.mark.parametrize("name", STRINGS)
@pytest.mark.parametrize("ascii", [True, False])
def test_an_escape_is_one_character(name, ascii):
    bounds, good, bad = STRINGS[name]
    schema = {"type": "string"} | bounds
    jsonschema.Draft202012Validator.check_schema(schema)
    assert [text for text in good if not takes(schema, json.dumps(text, ensure_ascii=ascii))] == []
    assert [text for text in bad if takes(schema, json.dumps(text, ensure_ascii=ascii))] == []


@pytest.mark.parametrize("schema", [{"maxLength": 9}, {"maxLength": 999}, {"pattern": r"^[^a]*$"}, {"minLength": 1}])
def test_what_json_does_not_allow_in_strings_is_not_written(schema):
    for text in ('"\n"', '"\x01"', '"\\x"', '"""', '"\\"', r'"\ud83d"', r'"\ude00"', r'"\u12"'):
        assert not takes({"type": "string"} | schema, text), text


def test_a_pattern_that_needs_escapes_is_refused_in_arguments_in_xml():
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "string", "pattern": '^"$'}}}}
    tag = {"type": "json_schema", "json_schema": schema, "style": "qwen_xml"}
    with pytest.raises(ValueError, match="has a pattern of what JSON has to escape at #/properties/a/items"):
        StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": tag})


@pytest.mark.parametrize("former", [False, True])
def test_schemas_in_structural_tags_are_followed_alike(former):
    schema = {"type": "object", "properties": {"code": {"type": "string", "maxLength": 30}}, "required": ["code", "z"]}
    tag: dict[str, Any] = {"begin": "<f>", "end": "</f>"}
    if former:
        given = {"structures": [{**tag, "schema": schema}], "triggers": ["<f>"]}
    else:
        content = {"type": "json_schema", "json_schema": schema}
        given = {
            "format": {
                "type": "triggered_tags",
                "triggers": ["<f>"],
                "tags": [{"type": "tag", **tag, "content": content}],
            }
        }
    source = StructuredOutputsParams(structural_tag={"type": "structural_tag", **given}).source
    for text, is_taken in ((f'{{"code": {json.dumps(CODE)}, "z": 1}}', True), ('{"code": "a"}', False)):
        matcher = testing._get_matcher_from_grammar(source.read())
        assert matcher.accept_string(f"so: <f>{text}</f>") == is_taken
    schema["properties"]["code"] = {"not": {}}
    with pytest.raises(ValueError, match=r"structural_tag=.* has not at #/properties/code"):
        StructuredOutputsParams(structural_tag={"type": "structural_tag", **given})
