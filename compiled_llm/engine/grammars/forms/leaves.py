"""Schemas of values of one type: what is common to two of them, and whether two exclude each other."""

# A leaf is a schema in a plain form: ``{}`` for any value; ``{"$ref": ...}``; ``{"enum": [...]}``; or one ``type`` with
# keywords of that type, in which schemas are lists of leaves, one of which a value follows. An empty list is no value.
# A leaf with ``IMPLICIT`` is of a type that a schema allows and does not mean: one with ``properties`` and without
# ``type`` allows numbers. Values of it are not written if there are others.

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from compiled_llm.engine.grammars.forms.keywords import NotFollowedError
from compiled_llm.engine.grammars.forms.patterns import occurs

Leaf = dict[str, Any]
Leaves = list[Leaf]
ANY: Leaves = [{}]
IMPLICIT = "implicit"
_DEEPEST, _FOLLOWED = 16, 2000
"""References inside one another, and in all, that are followed to see what holds beside them."""
_MOST = 256  # leaves of one schema: each part beside another one multiplies them


class References:
    """A schema's references: what they lead to, as far as it is needed to see what holds beside them."""

    def __init__(self, leaves_of: Callable[[str], Leaves]) -> None:
        self._leaves_of = leaves_of
        self._depth, self._followed = 0, 0

    def __call__(self, leaf: Leaf) -> Leaves:
        """Return the leaves that a reference leads to, none of them a reference."""
        self._followed += 1
        if self._depth == _DEEPEST or self._followed > _FOLLOWED:
            raise NotFollowedError("a $ref into itself, beside other keywords,")
        with self.inside():
            return [
                each for part in self._leaves_of(leaf["$ref"]) for each in (self(part) if "$ref" in part else [part])
            ]

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Count what is done here as one level deeper."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1


def intersect(one: Leaves, other: Leaves, expand: References) -> Leaves:
    """Return leaves of the values that follow both; NotFollowedError if no grammar can follow both."""
    if one in (ANY, other):
        return other
    if other == ANY:
        return one
    found = [leaf for left in one for right in other for leaf in _intersect(left, right, expand)]
    if len(found) > _MOST:
        raise NotFollowedError(f"keywords beside each other that come to more than {_MOST} alternatives,")
    return found


def _intersect(one: Leaf, other: Leaf, expand: References) -> Leaves:
    if not one or not other or one == other:
        return [one or other]
    for leaf, rest in ((one, other), (other, one)):
        if "$ref" in leaf:
            with expand.inside():
                return intersect(expand(leaf), [rest], expand)
    if IMPLICIT in one or IMPLICIT in other:
        found = _intersect(strip_marker(one), strip_marker(other), expand)
        return [{**leaf, IMPLICIT: True} for leaf in found] if IMPLICIT in one and IMPLICIT in other else found
    for leaf, rest in ((one, other), (other, one)):
        if "enum" in leaf:
            values = _choose(leaf["enum"], rest)
            return [{"enum": values}] if values else []
    kinds = {one["type"], other["type"]}
    if kinds == {"number", "integer"}:
        one, other = ({**leaf, "type": "integer"} for leaf in (one, other))
    elif len(kinds) == 2:
        return []
    of_type = _INTERSECT.get(one["type"])
    both = one if of_type is None else of_type(one, other, expand)
    return [] if both is None else [both]


def intersect_all(each: Iterable[Leaves], expand: References) -> Leaves:
    """Return leaves of the values that follow each of several schemas, as ``intersect``; ``ANY`` of none."""
    found = ANY
    for leaves in each:
        found = intersect(found, leaves, expand)
    return found


def strip_marker(leaf: Leaf) -> Leaf:
    """Return a leaf without ``IMPLICIT``."""
    return {name: each for name, each in leaf.items() if name != IMPLICIT}


def _intersect_numbers(one: Leaf, other: Leaf, _: References) -> Leaf | None:
    return number(one, other)


def number(*leaves: Leaf) -> Leaf | None:
    """Return a leaf of numbers with the tightest bound on each side; None if there are none."""
    low, above = (max(leaf.get(name, -math.inf) for leaf in leaves) for name in ("minimum", "exclusiveMinimum"))
    high, below = (min(leaf.get(name, math.inf) for leaf in leaves) for name in ("maximum", "exclusiveMaximum"))
    if leaves[0]["type"] == "integer":
        low, above = max(_whole(math.ceil, low), _whole(math.floor, above) + 1), -math.inf
        high, below = min(_whole(math.floor, high), _whole(math.ceil, below) - 1), math.inf
    if max(low, above) > min(high, below) or (max(low, above) == min(high, below) and (above >= low or below <= high)):
        return None
    found: Leaf = {"type": leaves[0]["type"]}
    if max(low, above) > -math.inf:
        found |= {"exclusiveMinimum": above} if above >= low else {"minimum": low}
    if min(high, below) < math.inf:
        found |= {"exclusiveMaximum": below} if below <= high else {"maximum": high}
    return found


def _whole(rounded: Callable[[float], int], bound: float) -> float:
    return bound if bound in (-math.inf, math.inf) else rounded(bound)


def _intersect_strings(one: Leaf, other: Leaf, _: References) -> Leaf | None:
    for name in ("pattern", "format"):
        if name in one and name in other and one[name] != other[name]:
            raise NotFollowedError(f"more than one {name} for a string")
    return sized(one | other, one, other)


_SIZES = {
    "string": ("minLength", "maxLength"),
    "array": ("minItems", "maxItems"),
    "object": ("minProperties", "maxProperties"),
}


def sized(found: Leaf, *leaves: Leaf) -> Leaf | None:
    """Return ``found`` with the tightest of the sizes of some leaves; None if nothing is within them."""
    least, most = _SIZES[found["type"]]
    low = max(leaf.get(least, 0) for leaf in leaves)
    high = min(leaf.get(most, math.inf) for leaf in leaves)
    rest = {name: value for name, value in found.items() if name not in (least, most)}
    sizes = ({least: int(low)} if low else {}) | ({most: int(high)} if high < math.inf else {})
    return None if low > high else rest | sizes


def _intersect_arrays(one: Leaf, other: Leaf, expand: References) -> Leaf | None:
    count = max(len(leaf.get("prefixItems", ())) for leaf in (one, other))
    first = [intersect(item(one, place), item(other, place), expand) for place in range(count)]
    both: Leaf = {"type": "array"} | ({"prefixItems": first} if first else {})
    return sized(both | _intersect_keywords(("items",), one, other, expand), one, other)


def item(leaf: Leaf, place: int) -> Leaves:
    """Return the leaves of an entry of an array."""
    first: list[Leaves] = leaf.get("prefixItems", [])
    rest: Leaves = leaf.get("items", ANY)
    return first[place] if place < len(first) else rest


def _intersect_objects(one: Leaf, other: Leaf, expand: References) -> Leaf | None:
    names, required = (
        list(dict.fromkeys([*one.get(keyword, ()), *other.get(keyword, ())])) for keyword in ("properties", "required")
    )
    properties = {name: intersect(value(one, name, expand), value(other, name, expand), expand) for name in names}
    both: Leaf = {"type": "object"} | ({"properties": properties} if names else {})
    both |= {"required": required} if required else {}
    both |= _intersect_keywords(("additionalProperties", "propertyNames"), one, other, expand)
    if patterns := _intersect_patterns(one, other, expand):
        both["patternProperties"] = patterns
    return sized(both, one, other)


def _intersect_keywords(keywords: Iterable[str], one: Leaf, other: Leaf, expand: References) -> Leaf:
    given = {keyword: [leaf[keyword] for leaf in (one, other) if keyword in leaf] for keyword in keywords}
    return {keyword: intersect_all(each, expand) for keyword, each in given.items() if each}


def _intersect_patterns(one: Leaf, other: Leaf, expand: References) -> dict[str, Leaves]:
    mine, others = one.get("patternProperties", {}), other.get("patternProperties", {})
    if mine and others and {*mine} != {*others}:
        raise NotFollowedError("different patternProperties for one object,")
    found = {}
    for pattern in mine or others:
        left = mine[pattern] if mine else one.get("additionalProperties", ANY)
        right = others[pattern] if others else other.get("additionalProperties", ANY)
        found[pattern] = intersect(left, right, expand)
    return found


def value(leaf: Leaf, name: str, expand: References) -> Leaves:
    """Return the leaves of a property of an object, named or not."""
    named, by_pattern = leaf.get("properties", {}), leaf.get("patternProperties", {})
    found: list[Leaves] = [named[name]] if name in named else []
    found += [each for pattern, each in by_pattern.items() if occurs(pattern, name)]
    return intersect_all(found or [leaf.get("additionalProperties", ANY)], expand)


_INTERSECT: dict[str, Callable[[Leaf, Leaf, References], Leaf | None]] = {
    "number": _intersect_numbers,
    "integer": _intersect_numbers,
    "string": _intersect_strings,
    "array": _intersect_arrays,
    "object": _intersect_objects,
}


# ---- values


def _choose(values: list[Any], leaf: Leaf) -> list[Any]:
    """Return those that follow a leaf; NotFollowedError if that is hard to tell."""
    if "enum" in leaf:
        keys = set(map(_key, leaf["enum"]))
        return [each for each in values if _key(each) in keys]
    return [each for each in values if holds(each, leaf)]


def type_of(given: object) -> str:
    """Return the type of a value of JSON; whole numbers are integers."""
    if isinstance(given, bool):
        return "boolean"
    if isinstance(given, (int, float)):
        return "integer" if given == int(given) else "number"
    names = {str: "string", list: "array", dict: "object", type(None): "null"}
    return names[type(given)]


def holds(given: Any, leaf: Leaf) -> bool:
    """Whether a value follows a leaf; NotFollowedError if that is hard to tell."""
    if "enum" in leaf:
        return bool(_choose([given], leaf))
    if not leaf:
        return True
    kind = type_of(given)
    if kind != leaf["type"] and (kind, leaf["type"]) != ("integer", "number"):
        return False
    rest = {name: bound for name, bound in leaf.items() if name not in ("type", IMPLICIT)}
    if kind in ("integer", "number"):
        above = given > rest.pop("exclusiveMinimum", -math.inf) and given >= rest.pop("minimum", -math.inf)
        return bool(above and given < rest.pop("exclusiveMaximum", math.inf) and given <= rest.pop("maximum", math.inf))
    if kind == "string" and "format" not in rest:
        long = rest.get("minLength", 0) <= len(given) <= rest.get("maxLength", math.inf)
        return long and ("pattern" not in rest or occurs(rest["pattern"], given))
    if rest:
        raise NotFollowedError(f"enum or const beside {next(iter(rest))},")
    return True


def _key(given: object) -> str:
    """Return a text that equal values of JSON share: 1 equals 1.0, and not true."""
    return json.dumps(_plain(given), sort_keys=True)


def _plain(given: object) -> object:
    if isinstance(given, float) and given == int(given):
        return int(given)
    if isinstance(given, dict):
        return {name: _plain(each) for name, each in given.items()}
    return [_plain(each) for each in given] if isinstance(given, list) else given


# ---- what excludes what


def excludes(one: Leaves, other: Leaves, expand: References) -> bool:
    """Whether no value that is written by ``one`` follows ``other``; False if that is hard to tell."""
    return all(_excludes(left, right, expand) for left in one for right in other)


def _excludes(one: Leaf, other: Leaf, expand: References) -> bool:
    if one == other or not one or not other:
        return False
    if "$ref" in one or "$ref" in other:
        with expand.inside():
            left, right = (expand(leaf) if "$ref" in leaf else [leaf] for leaf in (one, other))
            return excludes(left, right, expand)
    if "enum" in one or "enum" in other:
        values, leaf = (one["enum"], other) if "enum" in one else (other["enum"], one)
        try:
            return not _choose(values, leaf)
        except NotFollowedError:
            return False
    kinds = {one["type"], other["type"]}
    if kinds <= {"number", "integer"}:
        return not _intersect(one, other, expand)
    return len(kinds) == 2 or (kinds == {"object"} and _objects_exclude(one, other, expand))


def _objects_exclude(one: Leaf, other: Leaf, expand: References) -> bool:
    """Whether ``other`` requires a property that ``one`` does not write, or one that is required has other values."""
    open_ended = {"additionalProperties", "patternProperties", "propertyNames"} & one.keys()
    written = [name for name, leaves in one.get("properties", {}).items() if leaves]
    required = one.get("required", ())
    closed = not open_ended or one.get("additionalProperties") == []
    if closed and any(name not in written and name not in required for name in other.get("required", ())):
        return True
    return any(excludes(value(one, name, expand), value(other, name, expand), expand) for name in required)
