"""Forms are bounded before a library reads them: how deep, how long, how often repeated; each bound is told."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from compiled_llm.engine.apart.exchange import Failed
from compiled_llm.engine.grammars.forms import bounds
from compiled_llm.engine.grammars.forms.grammar_source import GrammarSource
from compiled_llm.engine.grammars.worker_messages import Compile, WorkerVocabulary
from compiled_llm.requests.structured_outputs import StructuredOutputsParams


def groups(levels: int) -> str:
    return "(" * levels + "a" + ")" * levels


def nested(levels: int) -> dict[str, Any]:
    """A schema of objects: each level of them is two of JSON."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels // 2):
        schema = {"properties": {"a": schema}, "type": "object", "required": ["a"]}
    return schema


def referring(count: int) -> dict[str, Any]:
    """A schema of 5 levels, each definition of which leads to the next one."""
    definitions: dict[str, Any] = {
        f"a{n}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{n + 1}"}}, "required": ["x"]}
        for n in range(1, count)
    }
    return {"$ref": "#/$defs/a1", "$defs": {**definitions, f"a{count}": {"type": "string"}}}


def cyclic() -> dict[str, Any]:
    schema: dict[str, Any] = {}
    schema["items"] = schema
    return schema


def doubling() -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(60):
        schema = {"anyOf": [schema, schema]}
    return schema


TAGS = {"type": "structural_tag"}
TOO_LARGE: list[tuple[str, Any, str]] = [
    ("regex", groups(32_000), "has 32,000 parentheses in a pattern; a form can have 1,000"),
    ("regex", groups(129), "has 129 levels, one inside the other; a form can have 128"),
    ("regex", "[)]" * 100 + groups(129), "has 129 levels"),
    ("regex", r"\c\((" * 501, "has 1,002 parentheses"),
    ("regex", "a" * 65_537, "has 65,537 characters in a pattern; a form can have 65,536"),
    ("regex", "a?" * 257, "has 257 repeats in a pattern; a form can have 256"),
    ("regex", "a{1,1000001}", "has 1,000,001 repeats, inside one another multiplied; a form can have 1,000,000"),
    ("regex", "((a{100}b){100}){101}", "has 1,010,000 repeats"),
    ("regex", "(a{3000}){400}?{2}", "has 1,200,000 repeats"),
    ("regex", "a{" + "9" * 5000 + "}", "has 9,999,999,999 repeats"),
    ("json", {"type": "string", "pattern": groups(32_000)}, "has 32,000 parentheses"),
    ("json", {"$ref": "#/x", "x": [{"pattern": groups(129)}]}, "has 129 levels"),
    ("json", {"patternProperties": {groups(129): {}}}, "has 129 levels"),
    ("json", nested(130), "has 129 levels, one inside the other"),
    ("json", json.dumps(nested(130)), "has 129 levels, one inside the other"),
    ("json", "[" * 100_000, "has 129 levels, one inside the other"),
    ("json", "[" * 300_000, "has 300,000 characters; a form can have 262,144"),
    ("json", {"enum": [1] * 100_000}, "has 300,010 characters"),
    ("json", cyclic(), "has 129 levels"),
    ("json", doubling(), "has 262,145 parts; a form can have 262,144"),
    ("json", referring(2000), "has 12,000 levels behind $ref, if each leads to another; a form can have 8,192"),
    ("choice", ["a" * 262_144], "has 262,155 characters"),
    ("grammar", "root ::= " + groups(129), "has 129 levels"),
    ("grammar", 'root ::= ("a"{1,2000} "b") {600}', "has 1,200,000 repeats"),
    ("grammar", "root ::= " + '"a" ' * 70_000, "has 280,009 characters"),
    ("grammar", "start: " + "[" * 129 + '"a"' + "]" * 129, "has 129 levels"),
    ("grammar", f"start: /{groups(129)}/", "has 129 levels"),
    ("grammar", 'start: "a" ~ 3 .. 1000001', "has 1,000,001 repeats"),
    ("structural_tag", "[" * 129, "has 129 levels"),
    ("structural_tag", {**TAGS, "format": {"type": "regex", "pattern": groups(129)}}, "has 129 levels"),
    ("structural_tag", {**TAGS, "format": {"type": "grammar", "grammar": f"root ::= {groups(129)}"}}, "has 129 levels"),
    ("structural_tag", {**TAGS, "format": {"json_schema": {"pattern": groups(129)}}}, "has 129 levels"),
]


@pytest.mark.parametrize(("field", "value", "message"), TOO_LARGE, ids=range(len(TOO_LARGE)))
def test_what_is_too_large_names_field_value_and_bound(field, value, message):
    with pytest.raises(ValueError, match=rf"^StructuredOutputsParams: {field}=.{{1,3000}} {re.escape(message)}"):
        StructuredOutputsParams(**{field: value})


FINE: list[tuple[str, Any]] = [
    ("regex", groups(128)),
    ("regex", "(?:a|b)" * 1000),
    ("regex", "(?:a{1,1000}){1,1000}b{1000000}"),
    ("regex", r"\(" * 1000 + "[" + ")" * 200 + "]"),
    ("regex", "(a{1000}b{1000}){1000}"),
    ("json", nested(126)),
    ("json", json.dumps(nested(126))),
    ("json", referring(1365)),
    ("json", {"const": "[" * 500 + "(" * 2000}),
    ("json", '{"const": "' + r"\"" * 500 + "[" * 500 + '"}'),
    ("grammar", 'root ::= "f(" # (((' + '"(" ' * 500 + "\n" + 'a ::= "(" ' * 500),
    ("grammar", "root ::= [(] " * 500),
    ("grammar", 'start: "(" ' + '"[" ' * 500 + "// (((\n" + r"/[(\]]\// " * 200),
    ("choice", ["("] * 1000),
]


@pytest.mark.parametrize(("field", "value"), FINE, ids=range(len(FINE)))
def test_what_is_as_large_as_may_be_is_taken(field, value):
    assert StructuredOutputsParams(**{field: value}).source.text


# ---- at the bounds, xgrammar does not crash


@pytest.fixture(scope="module")
def vocabulary() -> WorkerVocabulary:
    xgrammar = pytest.importorskip("xgrammar")
    info = xgrammar.TokenizerInfo([bytes([byte]) for byte in range(256)], stop_token_ids=[0])
    return WorkerVocabulary(0, info.serialize_json(), 1)


def deepest_references() -> dict[str, Any]:
    """As many levels in as many definitions as may be, the deepest of each of which leads to the next one."""
    levels = 64
    count = bounds.MAX_REFERENCED // (levels + 3)
    inner = [
        {"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{n + 1}"}}, "required": ["x"]} for n in range(count)
    ]
    for number, schema in enumerate(inner):
        for _ in range((levels - 4) // 2):
            schema = {"anyOf": [schema, {"type": "null"}]} if number % 2 else {"type": "array", "prefixItems": [schema]}
        inner[number] = schema
    definitions = {f"a{n}": schema for n, schema in enumerate(inner)}
    return {"$ref": "#/$defs/a0", "$defs": {**definitions, f"a{count}": {"type": "string"}}}


LARGEST = {
    "groups in a pattern": {"json": {"type": "string", "pattern": "(" * 1000 + ")" * 1000}},
    "levels of a pattern": {"regex": groups(128)},
    "levels of EBNF": {"grammar": "root ::= " + "(" * 128 + '"a"' + ")" * 128},
    "levels of Lark": {"grammar": "start: " + "(" * 128 + '"a"' + ")" * 128},
    "levels of JSON": {"json": nested(126)},
    "levels of arrays": {"json": '{"items":' * 127 + "{}" + "}" * 127},
    "levels of choices": {"json": '{"anyOf":[' * 63 + "{}" + "]}" * 63},
    "references": {"json": referring(1365)},
    "levels behind references": {"json": deepest_references()},
    "repeats": {"regex": "((a{100}){100}){100}"},
}


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("form", LARGEST.values(), ids=LARGEST)
def test_xgrammar_takes_what_is_within_the_bounds(form, lasting_worker, vocabulary):
    if "pattern" in str(form)[:40]:  # deeper than it may be, as deep as it could be if its levels were miscounted
        source = GrammarSource("json", json.dumps(form["json"]))
    else:
        source = StructuredOutputsParams(**form).source
    asked = Compile(0, source, seconds=5, memory=2**29)
    answer = lasting_worker.compile(asked, vocabulary, lambda: True)
    assert not (isinstance(answer, Failed) and answer.kind in ("crash", "lost")), answer
