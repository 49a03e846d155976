"""A JSON schema, rewritten into the part of that language that xgrammar follows."""

# Keywords beside each other hold together; xgrammar follows one of them and passes over the rest. So a schema is read
# into leaves, each of which is one keyword, or one type with keywords of that type, and these are written again.

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from compiled_llm.engine.grammars.forms import patterns
from compiled_llm.engine.grammars.forms.keywords import (
    FORMATS,
    OF_TYPE,
    TYPES,
    WHOLE,
    NotFollowedError,
    check_keywords,
)
from compiled_llm.engine.grammars.forms.leaves import (
    ANY,
    UNMEANT,
    Leaf,
    Leaves,
    References,
    excludes,
    holds,
    item,
    meant,
    met,
    number,
    sized,
    value,
)

_STRINGS: Leaves = [{"type": "string"}]
_COMBINING = ("$ref", "allOf", "anyOf", "oneOf")
_MOST_APART = 100  # alternatives each of which is compared with all others
_EXACT = 10**15  # fractions are smaller: xgrammar writes six digits after the point, and a float has 15 in all


def rewritten(schema: Any, for_json: bool = True) -> Any:
    """Return a schema that xgrammar follows, of the same values; ValueError says what and where, if there is none."""
    # Patterns of strings are for the text of JSON, those of arguments in XML, without ``for_json``, for their own.
    return _Rewriting(schema, for_json).whole()


class _Rewriting:
    """A rewriting of one schema; what its references lead to is written once, as definitions."""

    def __init__(self, root: Any, for_json: bool) -> None:
        self._root, self._for_json = root, for_json
        self._names: dict[str, str] = {}  # of definitions, by the place that references name
        self._read: dict[str, Leaves] = {}  # leaves of those places
        self._reading: set[str] = set()
        self._expand = References(self._of_place)

    def whole(self) -> Any:
        found = self._written(self._leaves(self._root, "#"), "#")
        if found is None:
            raise ValueError("has no value that follows it")
        definitions: dict[str, Any] = {}
        while left := [place for place, name in self._names.items() if name not in definitions]:
            for place in left:
                written = self._written(self._of_place(place), place)
                if written is None:
                    raise ValueError(f"has no value that follows it at {place}")
                definitions[self._names[place]] = written
        return {**found, "$defs": definitions} if definitions else found

    # ---- reading

    def _leaves(self, schema: Any, place: str) -> Leaves:
        """Return the leaves of a schema; ValueError with its place if it cannot be followed."""
        if isinstance(schema, bool):
            return ANY if schema else []
        try:
            check_keywords(schema)
            if "$id" in schema and place != "#":
                raise NotFollowedError("$id inside of a schema")
            found = self._own(schema, place)
            for keyword in _COMBINING:
                if keyword in schema and keyword != "oneOf":
                    found = met(found, self._combined(keyword, schema, place), self._expand)
            for values in ([schema["const"]] if "const" in schema else None, schema.get("enum")):
                if values is not None:
                    found = met(found, [{"enum": [*map(_checked_value, values)]}], self._expand)
            return self._one_of(found, schema, place) if "oneOf" in schema else found
        except NotFollowedError as error:
            raise ValueError(f"has {error} at {place}, which grammars do not follow; leave it out") from error

    def _combined(self, keyword: str, schema: Mapping[str, Any], place: str) -> Leaves:
        if keyword == "$ref":
            return [{"$ref": self._target(schema["$ref"])}]
        parts = self._parts(keyword, schema, place)
        if keyword == "anyOf":
            return [leaf for part in parts for leaf in part]
        found = ANY
        for part in parts:
            found = met(found, part, self._expand)
        return found

    def _parts(self, keyword: str, schema: Mapping[str, Any], place: str) -> list[Leaves]:
        return [self._leaves(part, f"{place}/{keyword}/{n}") for n, part in enumerate(schema[keyword])]

    def _one_of(self, beside: Leaves, schema: Mapping[str, Any], place: str) -> Leaves:
        """Return the leaves of a schema with oneOf, of which exactly one holds, since they exclude each other."""
        parts = [met(beside, part, self._expand) for part in self._parts("oneOf", schema, place)]
        discriminator = schema.get("discriminator")
        name = discriminator.get("propertyName") if isinstance(discriminator, Mapping) else None
        if isinstance(name, str):  # in OpenAPI, values have it
            parts = [self._with(name, part) for part in parts]
        if sum(map(len, parts)) > _MOST_APART:
            raise NotFollowedError(f"oneOf of more than {_MOST_APART} alternatives")
        for place_, one in enumerate(parts):
            for other in parts[:place_]:
                if not (excludes(one, other, self._expand) and excludes(other, one, self._expand)):
                    raise NotFollowedError("oneOf of which several may hold (anyOf is followed)")
        return [leaf for part in parts for leaf in part]

    def _with(self, name: str, leaves: Leaves) -> Leaves:
        """Return leaves of objects that have a property."""
        found: Leaves = []
        for leaf in leaves:
            inner = self._expand(leaf) if "$ref" in leaf else [leaf]
            has = all(name in each.get("required", ()) for each in inner)
            found += [leaf] if has else met([leaf], [{"type": "object", "required": [name]}], self._expand)
        return found

    def _own(self, schema: Mapping[str, Any], place: str) -> Leaves:
        """Return leaves of what a schema says by its type, and by keywords of one type."""
        kinds, main = _types(schema), _meant(schema)
        leaves = []
        for kind in kinds:
            keywords = {name: schema[name] for name in OF_TYPE.get(_kind(kind), ()) if name in schema}
            leaf = self._leaf(kind, keywords, schema, place)
            leaves += [] if leaf is None else [leaf if main in (None, kind) else {**leaf, UNMEANT: True}]
        return leaves if kinds else ANY

    def _leaf(self, kind: str, keywords: dict[str, Any], schema: Mapping[str, Any], place: str) -> Leaf | None:
        """Return the leaf of one type; None if no value follows it."""
        leaf: Leaf = {"type": kind, **keywords}
        if kind in ("number", "integer"):
            return number(leaf)
        if kind == "string":
            _check_string(leaf)
            return sized(leaf, leaf, {}, ("minLength", "maxLength"))
        if kind == "array":
            return self._array(leaf, schema, place)
        return self._object(leaf, schema, place) if kind == "object" else leaf

    def _array(self, leaf: Leaf, schema: Mapping[str, Any], place: str) -> Leaf | None:
        former = isinstance(leaf.get("items"), list)
        if former:  # as it was until 2019
            leaf["prefixItems"] = leaf.pop("items")
            if "additionalItems" in leaf:
                leaf["items"] = leaf["additionalItems"]
        leaf.pop("additionalItems", None)
        self._evaluated(leaf, schema, "unevaluatedItems", "items")
        if "prefixItems" in leaf:
            inside = f"{place}/{'items' if former else 'prefixItems'}"
            leaf["prefixItems"] = [self._leaves(each, f"{inside}/{n}") for n, each in enumerate(leaf["prefixItems"])]
        if "items" in leaf:
            leaf["items"] = self._leaves(leaf["items"], f"{place}/items")
        return sized(leaf, leaf, {}, ("minItems", "maxItems"))

    def _object(self, leaf: Leaf, schema: Mapping[str, Any], place: str) -> Leaf | None:
        self._evaluated(leaf, schema, "unevaluatedProperties", "additionalProperties")
        for keyword in ("properties", "patternProperties"):
            if keyword in leaf:
                named = leaf[keyword]
                leaf[keyword] = {name: self._leaves(each, f"{place}/{keyword}/{name}") for name, each in named.items()}
        for keyword in ("additionalProperties", "propertyNames"):
            if keyword in leaf:
                leaf[keyword] = self._leaves(leaf[keyword], f"{place}/{keyword}")
        if "propertyNames" in leaf:
            leaf["propertyNames"] = met(leaf["propertyNames"], _STRINGS, self._expand)
            if leaf["propertyNames"] == _STRINGS:
                del leaf["propertyNames"]
        for pattern in leaf.get("patternProperties", ()):
            _parsed(pattern)
        return sized(leaf, leaf, {}, ("minProperties", "maxProperties"))

    @staticmethod
    def _evaluated(leaf: Leaf, schema: Mapping[str, Any], keyword: str, others: str) -> None:
        """Replace a keyword that holds for what no other keyword has named."""
        if keyword not in leaf:
            return
        if any(combining in schema for combining in _COMBINING):
            raise NotFollowedError(f"{keyword} beside other schemas")
        leaf.setdefault(others, leaf.pop(keyword))

    # ---- references

    def _target(self, reference: str) -> str:
        """Return the place that a reference leads to, through others that only lead on."""
        seen = [reference]
        while True:
            found = self._at(seen[-1])
            on = found.get("$ref") if isinstance(found, Mapping) else None
            if not isinstance(on, str) or _asserts(found):
                return seen[-1]
            if on in seen:
                raise NotFollowedError(f"$ref to {reprlib.repr(reference)}, which leads only to itself,")
            seen.append(on)

    def _at(self, reference: str) -> Any:
        if not reference.startswith("#"):
            raise NotFollowedError(f"$ref to {reprlib.repr(reference)}, outside of the schema,")
        found = self._root
        path = unquote(reference[1:])
        for step in path.split("/")[1:] if path.startswith("/") else [path] if path else []:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            elif isinstance(found, Mapping) and name in found and path.startswith("/"):
                found = found[name]
            else:
                raise NotFollowedError(f"$ref to {reprlib.repr(reference)}, which leads nowhere,")
        if not isinstance(found, (Mapping, bool)):
            raise NotFollowedError(f"$ref to {reprlib.repr(reference)}, which is no schema,")
        return found

    def _of_place(self, place: str) -> Leaves:
        if place in self._reading:
            raise NotFollowedError("a $ref into itself, beside other keywords,")
        if place not in self._read:
            self._reading.add(place)
            self._read[place] = self._leaves(self._at(place), place)
            self._reading.discard(place)
        return self._read[place]

    # ---- writing

    def _written(self, leaves: Leaves, place: str) -> dict[str, Any] | None:
        """Return a schema of leaves; None if no value follows them."""
        try:
            found = self._written_leaves([leaf for leaf in leaves if UNMEANT not in leaf], place)
            found = found or self._written_leaves([meant(leaf) for leaf in leaves if UNMEANT in leaf], place)
        except NotFollowedError as error:
            raise ValueError(f"has {error} at {place}, which grammars do not follow; leave it out") from error
        if {} in found:
            return {}
        return {"anyOf": found} if len(found) > 1 else found[0] if found else None

    def _written_leaves(self, leaves: Leaves, place: str) -> list[dict[str, Any]]:
        return [written for leaf in leaves if (written := self._written_leaf(leaf, place)) is not None]

    def _written_leaf(self, leaf: Leaf, place: str) -> dict[str, Any] | None:
        if "$ref" in leaf:
            return {"$ref": f"#/$defs/{self._names.setdefault(leaf['$ref'], str(len(self._names)))}"}
        kind = leaf.get("type")
        if len(leaf) == 1:
            return leaf
        if kind == "string":
            return self._written_string(leaf)
        if kind in ("number", "integer"):
            return _checked_number(leaf)
        if kind == "array":
            return self._written_array(leaf, place)
        return self._written_object(leaf, place) if kind == "object" else leaf

    def _written_string(self, leaf: Leaf) -> dict[str, Any] | None:
        if "format" in leaf:
            if len(leaf) > 2:
                raise NotFollowedError("format beside pattern, minLength or maxLength")
            return leaf
        if "pattern" not in leaf:
            return leaf
        node = _bounded(leaf)
        if node is None:
            return None
        if self._for_json:
            return {"type": "string", "pattern": patterns.written(node)}
        if len(leaf) > 2:
            raise NotFollowedError("pattern beside minLength or maxLength")
        if not patterns.is_raw(node):
            raise NotFollowedError("a pattern of what JSON has to escape")
        return leaf

    def _written_array(self, leaf: Leaf, place: str) -> dict[str, Any] | None:
        most = leaf.get("maxItems", math.inf)
        first: list[Any] = []
        for place_ in range(min(len(leaf.get("prefixItems", ())), most)):
            entry = self._written(item(leaf, place_), f"{place}/prefixItems/{place_}")
            if entry is None:
                most = place_
                break
            first.append(entry)
        rest = self._written(leaf["items"], f"{place}/items") if "items" in leaf else None if first else {}
        if rest is None and "items" not in leaf and leaf.get("minItems", 0) > len(first):
            rest = {}
        if len(first) >= most:
            rest = None
        if rest is None:
            most = min(most, len(first))
        if leaf.get("minItems", 0) > most:
            return None
        found: dict[str, Any] = {"type": "array"} | ({"prefixItems": first} if first else {})
        found |= {"items": False if rest is None else rest}
        found |= {"minItems": leaf["minItems"]} if "minItems" in leaf else {}
        return found | ({"maxItems": most} if rest is not None and most < math.inf else {})

    def _written_object(self, leaf: Leaf, place: str) -> dict[str, Any] | None:
        required = list(leaf.get("required", ()))
        named: dict[str, Any] = {}
        for name in dict.fromkeys([*leaf.get("properties", ()), *required]):
            allowed = self._may_be_called(name, leaf)
            each = self._written(value(leaf, name, self._expand), f"{place}/properties/{name}") if allowed else None
            if each is None and name in required:
                return None
            named |= {} if each is None else {name: each}
        others = self._others(leaf, named, place)
        most = leaf.get("maxProperties", math.inf)
        least = leaf.get("minProperties", 0)
        if len(required) > most or (not others and least > len(named)):
            return None
        if others and least > max(1, len(required)):
            raise NotFollowedError("minProperties beside names that are free, and may repeat")
        found: dict[str, Any] = {"type": "object"} | ({"properties": named} if named else {})
        found |= {"required": required} if required else {}
        found |= others or {"additionalProperties": False}
        found |= {"minProperties": least} if least > len(required) else {}
        return found | ({"maxProperties": most} if most < math.inf else {})

    def _may_be_called(self, name: str, leaf: Leaf) -> bool:
        return any(holds(name, each) for each in leaf.get("propertyNames", _STRINGS))

    def _others(self, leaf: Leaf, named: dict[str, Any], place: str) -> dict[str, Any]:
        """Return keywords for the properties of an object that its schema does not name; none if there are none."""
        known = [*dict.fromkeys([*leaf.get("properties", ()), *named])]
        by_pattern = leaf.get("patternProperties")
        free = ANY if not known and not by_pattern else []  # unless it says that there may be others
        others = self._written(leaf.get("additionalProperties", free), f"{place}/additionalProperties")
        if by_pattern:
            return self._by_pattern(leaf, known, others, place)
        if others is None:
            return {}
        if "propertyNames" in leaf:
            if known:
                raise NotFollowedError("propertyNames beside properties and additionalProperties")
            called = self._written(leaf["propertyNames"], f"{place}/propertyNames")
            if called is not None and "anyOf" in called:
                raise NotFollowedError("propertyNames of several kinds")
            return {} if called is None else {"propertyNames": called, "additionalProperties": others}
        if known and self._for_json:
            return {"patternProperties": {patterns.other_names(known): others}, "additionalProperties": False}
        return {"additionalProperties": others}

    def _by_pattern(self, leaf: Leaf, known: list[str], others: Any, place: str) -> dict[str, Any]:
        ((pattern, leaves), *several) = leaf["patternProperties"].items()
        if several or others is not None or "propertyNames" in leaf:
            raise NotFollowedError("patternProperties beside others, additionalProperties or propertyNames")
        if any(patterns.occurs(pattern, name) for name in known):
            raise NotFollowedError("patternProperties that match a name in properties")
        each = self._written(leaves, f"{place}/patternProperties/{pattern}")
        if each is None:
            return {}
        text = patterns.written(_parsed(pattern)) if self._for_json else pattern
        return {"patternProperties": {text: each}, "additionalProperties": False}


def _types(schema: Mapping[str, Any]) -> list[str]:
    """Return the types that a schema says or tells apart; none if it holds for all of them alike."""
    said = schema.get("type")
    if said is None:
        said = TYPES if any(names.keys() & schema.keys() for names in OF_TYPE.values()) else ()
    kinds = [said] if isinstance(said, str) else list(said)
    return [kind for kind in kinds if kind != "integer" or "number" not in kinds]


def _meant(schema: Mapping[str, Any]) -> str | None:
    """Return the type that a schema means without saying it; None if there is none."""
    if "type" in schema:
        return None
    return "object" if "properties" in schema else "array" if {"items", "prefixItems"} & schema.keys() else None


def _kind(kind: str) -> str:
    """Return the type by whose name keywords are listed."""
    return "number" if kind == "integer" else kind


def _asserts(schema: Mapping[str, Any]) -> bool:
    """Whether a schema says more about values than where its reference leads."""
    others = {"type", "enum", "const", *_COMBINING, *(name for forms in OF_TYPE.values() for name in forms)} - {"$ref"}
    return bool(others & schema.keys())


def _check_string(leaf: Leaf) -> None:
    if leaf.get("format", FORMATS[0]) not in FORMATS:
        raise NotFollowedError(f"format {reprlib.repr(leaf['format'])}")
    if "pattern" in leaf:
        _parsed(leaf["pattern"])


def _parsed(pattern: str) -> patterns.Node:
    try:
        return patterns.parsed(pattern)
    except ValueError as error:
        raise NotFollowedError(str(error)) from error


def _bounded(leaf: Leaf) -> patterns.Node | None:
    node = _parsed(leaf["pattern"])
    try:
        return patterns.bounded(node, leaf.get("minLength", 0), leaf.get("maxLength"))
    except ValueError as error:
        raise NotFollowedError(str(error)) from error


def _checked_number(leaf: Leaf) -> Leaf:
    for name, bound in leaf.items():
        if name == "type":
            continue
        exact = abs(bound) < WHOLE if leaf["type"] == "integer" else abs(bound) < _EXACT and round(bound, 6) == bound
        if not exact:
            raise NotFollowedError(f"{name}={reprlib.repr(bound)}, a bound with too many digits,")
    return leaf


def _checked_value(given: Any) -> Any:
    """Return a value that an answer may have to be; NotFollowedError if a number in it has too many digits."""
    waiting = [given]
    while waiting:
        each = waiting.pop()
        if isinstance(each, (list, Mapping)):
            waiting += each.values() if isinstance(each, Mapping) else each
        elif isinstance(each, float) and not math.isfinite(each):
            raise NotFollowedError(f"the value {each!r}")
        elif isinstance(each, int) and abs(each) >= WHOLE:
            raise NotFollowedError(f"the value {reprlib.repr(each)}, a number with too many digits,")
    return given
