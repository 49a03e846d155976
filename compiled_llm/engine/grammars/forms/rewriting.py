"""A JSON schema, rewritten into the part of that language that xgrammar follows."""

# Keywords beside each other hold together; xgrammar follows one of them and passes over the rest. So a schema is read
# into leaves, each of which is one keyword, or one type with keywords of that type, and these are written again.

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from typing import Any, TypeVar
from urllib.parse import unquote

from compiled_llm.engine.grammars.forms import patterns
from compiled_llm.engine.grammars.forms.keywords import (
    FOLLOWED,
    FORMATS,
    OF_TYPE,
    TYPES,
    WHOLE,
    NotFollowedError,
    check_keywords,
)
from compiled_llm.engine.grammars.forms.leaves import (
    ANY,
    IMPLICIT,
    Leaf,
    Leaves,
    References,
    excludes,
    holds,
    intersect,
    intersect_all,
    item,
    number,
    sized,
    strip_marker,
    value,
)

_STRINGS: Leaves = [{"type": "string"}]
_COMBINING = ("$ref", "allOf", "anyOf", "oneOf")
_MOST_APART = 100  # alternatives each of which is compared with all others
Value = TypeVar("Value")
_EXACT = 10**15  # fractions are smaller: xgrammar writes six digits after the point, and a float has 15 in all


def rewrite(schema: Any, for_json: bool = True) -> Any:
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
        found = self._render(self._leaves(self._root, "#"), "#")
        if found is None:
            raise ValueError("has no value that follows it")
        definitions: dict[str, Any] = {}
        while left := [place for place, name in self._names.items() if name not in definitions]:
            for place in left:
                written = self._render(self._of_place(place), place)
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
                    found = intersect(found, self._combined(keyword, schema, place), self._expand)
            for values in ([schema["const"]] if "const" in schema else None, schema.get("enum")):
                if values is not None:
                    found = intersect(found, [{"enum": [*map(_checked_value, values)]}], self._expand)
            return self._one_of(found, schema, place) if "oneOf" in schema else found
        except NotFollowedError as error:
            raise _refusal(error, place) from error

    def _combined(self, keyword: str, schema: Mapping[str, Any], place: str) -> Leaves:
        if keyword == "$ref":
            return [{"$ref": self._target(schema["$ref"])}]
        parts = self._parts(keyword, schema, place)
        if keyword == "anyOf":
            return [leaf for part in parts for leaf in part]
        return intersect_all(parts, self._expand)

    def _parts(self, keyword: str, schema: Mapping[str, Any], place: str) -> list[Leaves]:
        return [self._leaves(part, f"{place}/{keyword}/{n}") for n, part in enumerate(schema[keyword])]

    def _one_of(self, beside: Leaves, schema: Mapping[str, Any], place: str) -> Leaves:
        """Return the leaves of a schema with oneOf, of which exactly one holds, since they exclude each other."""
        parts = [intersect(beside, part, self._expand) for part in self._parts("oneOf", schema, place)]
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
            found += [leaf] if has else intersect([leaf], [{"type": "object", "required": [name]}], self._expand)
        return found

    def _own(self, schema: Mapping[str, Any], place: str) -> Leaves:
        """Return leaves of what a schema says by its type, and by keywords of one type."""
        kinds, main = _types(schema), _meant_type(schema)
        leaves = []
        for kind in kinds:
            leaf = self._leaf(kind, schema, place)
            leaves += [] if leaf is None else [leaf if main in (None, kind) else {**leaf, IMPLICIT: True}]
        return leaves if kinds else ANY

    def _leaf(self, kind: str, schema: Mapping[str, Any], place: str) -> Leaf | None:
        """Return the leaf of one type; None if no value follows it."""
        leaf: Leaf = {"type": kind} | {name: schema[name] for name in OF_TYPE.get(kind, ()) if name in schema}
        if kind in ("number", "integer"):
            return number(leaf)
        if kind == "string":
            _check_string(leaf)
            return sized(leaf, leaf)
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
        return sized(leaf, leaf)

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
            leaf["propertyNames"] = intersect(leaf["propertyNames"], _STRINGS, self._expand)
            if leaf["propertyNames"] == _STRINGS:
                del leaf["propertyNames"]
        for pattern in leaf.get("patternProperties", ()):
            patterns.parse(pattern)
        return sized(leaf, leaf)

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

    def _render(self, leaves: Leaves, place: str) -> dict[str, Any] | None:
        """Return a schema of leaves; None if no value follows them."""
        try:
            found = self._render_leaves([leaf for leaf in leaves if IMPLICIT not in leaf], place)
            found = found or self._render_leaves([strip_marker(leaf) for leaf in leaves if IMPLICIT in leaf], place)
        except NotFollowedError as error:
            raise _refusal(error, place) from error
        if {} in found:
            return {}
        return {"anyOf": found} if len(found) > 1 else found[0] if found else None

    def _render_leaves(self, leaves: Leaves, place: str) -> list[dict[str, Any]]:
        return [written for leaf in leaves if (written := self._render_leaf(leaf, place)) is not None]

    def _render_leaf(self, leaf: Leaf, place: str) -> dict[str, Any] | None:
        if "$ref" in leaf:
            return {"$ref": f"#/$defs/{self._names.setdefault(leaf['$ref'], str(len(self._names)))}"}
        kind = leaf.get("type")
        if len(leaf) == 1:
            return leaf
        if kind == "string":
            return self._render_string(leaf)
        if kind in ("number", "integer"):
            return _checked_number(leaf)
        if kind == "array":
            return self._render_array(leaf, place)
        return self._render_object(leaf, place) if kind == "object" else leaf

    def _render_string(self, leaf: Leaf) -> dict[str, Any] | None:
        if "format" in leaf:
            if len(leaf) > 2:
                raise NotFollowedError("format beside pattern, minLength or maxLength")
            return leaf
        if "pattern" not in leaf:
            return leaf
        node = patterns.limit_length(patterns.parse(leaf["pattern"]), leaf.get("minLength", 0), leaf.get("maxLength"))
        if node is None:
            return None
        if self._for_json:
            return {"type": "string", "pattern": patterns.render(node)}
        if len(leaf) > 2:
            raise NotFollowedError("pattern beside minLength or maxLength")
        if not patterns.is_raw(node):
            raise NotFollowedError("a pattern of what JSON has to escape")
        return leaf

    def _render_array(self, leaf: Leaf, place: str) -> dict[str, Any] | None:
        least, most = leaf.get("minItems", 0), leaf.get("maxItems", math.inf)
        first: list[Any] = []
        for place_ in range(min(len(leaf.get("prefixItems", ())), most)):
            entry = self._render(item(leaf, place_), f"{place}/prefixItems/{place_}")
            if entry is None:
                most = place_
                break
            first.append(entry)
        free = ANY if not first or least > len(first) else []  # unless it says that there may be others
        rest = self._render(leaf.get("items", free), f"{place}/items") if len(first) < most else None
        if least > (most if rest is not None else len(first)):
            return None
        found: dict[str, Any] = {"type": "array"} | ({"prefixItems": first} if first else {})
        found |= {"items": False if rest is None else rest} | ({"minItems": least} if least else {})
        return found | ({"maxItems": most} if rest is not None and most < math.inf else {})

    def _render_object(self, leaf: Leaf, place: str) -> dict[str, Any] | None:
        required = list(leaf.get("required", ()))
        named: dict[str, Any] = {}
        for name in dict.fromkeys([*leaf.get("properties", ()), *required]):
            allowed = self._may_be_called(name, leaf)
            each = self._render(value(leaf, name, self._expand), f"{place}/properties/{name}") if allowed else None
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
        others = self._render(leaf.get("additionalProperties", free), f"{place}/additionalProperties")
        if by_pattern:
            return self._by_pattern(leaf, known, others, place)
        if others is None:
            return {}
        if "propertyNames" in leaf:
            if known:
                raise NotFollowedError("propertyNames beside properties and additionalProperties")
            called = self._render(leaf["propertyNames"], f"{place}/propertyNames")
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
        each = self._render(leaves, f"{place}/patternProperties/{pattern}")
        if each is None:
            return {}
        text = patterns.render(patterns.parse(pattern)) if self._for_json else pattern
        return {"patternProperties": {text: each}, "additionalProperties": False}


def _types(schema: Mapping[str, Any]) -> list[str]:
    """Return the types that a schema says or tells apart; none if it holds for all of them alike."""
    said = schema.get("type")
    if said is None:
        said = TYPES if any(names.keys() & schema.keys() for names in OF_TYPE.values()) else ()
    kinds = [said] if isinstance(said, str) else list(said)
    return [kind for kind in kinds if kind != "integer" or "number" not in kinds]


def _meant_type(schema: Mapping[str, Any]) -> str | None:
    """Return the type that a schema means without saying it; None if there is none."""
    if "type" in schema:
        return None
    return "object" if "properties" in schema else "array" if {"items", "prefixItems"} & schema.keys() else None


def _asserts(schema: Mapping[str, Any]) -> bool:
    """Whether a schema says more about values than where its reference leads."""
    return bool((FOLLOWED.keys() - {"$ref"}) & schema.keys())


def _check_string(leaf: Leaf) -> None:
    if leaf.get("format", FORMATS[0]) not in FORMATS:
        raise NotFollowedError(f"format {reprlib.repr(leaf['format'])}")
    if "pattern" in leaf:
        patterns.parse(leaf["pattern"])


def _refusal(error: NotFollowedError, place: str) -> ValueError:
    return ValueError(f"has {error} at {place}, which grammars do not follow; leave it out")


def _checked_number(leaf: Leaf) -> Leaf:
    for name, bound in leaf.items():
        if name == "type":
            continue
        exact = abs(bound) < WHOLE if leaf["type"] == "integer" else abs(bound) < _EXACT and round(bound, 6) == bound
        if not exact:
            raise NotFollowedError(f"{name}={reprlib.repr(bound)}, a bound with too many digits,")
    return leaf


def _checked_value(given: Value) -> Value:
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
