"""Schemas of values of one type: what is common to two of them, and whether two exclude each other."""

# A leaf is a schema in a plain form: ``{}`` for any value; ``{"$ref": ...}``; ``{"enum": [...]}``; or one ``type`` with
# keywords of that type, in which schemas are lists of leaves, one of which a value follows. An empty list is no value.
# A leaf with ``UNMEANT`` is of a type that a schema allows and does not mean: one with ``properties`` and without
# ``type`` allows numbers. Values of it are not written if there are others.

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from compiled_llm.engine.grammars.forms.keywords import NotFollowedError
from compiled_llm.engine.grammars.forms.patterns import occurs

Leaf = dict[str, Any]
Leaves = list[Leaf]
ANY: Leaves = [{}]
UNMEANT = "unmeant"
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


def met(one: Leaves, other: Leaves, expand: References) -> Leaves:
    """Return leaves of the values that follow both; NotFollowedError if no grammar can follow both."""
    if one in (ANY, other):
        return other
    if other == ANY:
        return one
    found = [leaf for left in one for right in other for leaf in _met(left, right, expand)]
    if len(found) > _MOST:
        raise NotFollowedError(f"keywords beside each other that come to more than {_MOST} alternatives,")
    return found


def _met(one: Leaf, other: Leaf, expand: References) -> Leaves:
    if not one or not other or one == other:
        return [one or other]
    for leaf, rest in ((one, other), (other, one)):
        if "$ref" in leaf:
            with expand.inside():
                return met(expand(leaf), [rest], expand)
    if UNMEANT in one or UNMEANT in other:
        found = _met(meant(one), meant(other), expand)
        return [{**leaf, UNMEANT: True} for leaf in found] if UNMEANT in one and UNMEANT in other else found
    for leaf, rest in ((one, other), (other, one)):
        if "enum" in leaf:
            values = _chosen(leaf["enum"], rest)
            return [{"enum": values}] if values else []
    kinds = {one["type"], other["type"]}
    if kinds == {"number", "integer"}:
        one, other = ({**leaf, "type": "integer"} for leaf in (one, other))
    elif len(kinds) == 2:
        return []
    meet = _MEETINGS.get(one["type"])
    both = one if meet is None else meet(one, other, expand)
    return [] if both is None else [both]


def _all_met(each: list[Leaves], expand: References) -> Leaves:
    found = ANY
    for leaves in each:
        found = met(found, leaves, expand)
    return found


def meant(leaf: Leaf) -> Leaf:
    """Return a leaf without ``UNMEANT``."""
    return {name: each for name, each in leaf.items() if name != UNMEANT}


def _numbers_met(one: Leaf, other: Leaf, _: References) -> Leaf | None:
    return number(one | _tighter(one, other))


def _tighter(one: Leaf, other: Leaf) -> Leaf:
    found: Leaf = {}
    for names, tighter in ((("minimum", "exclusiveMinimum"), max), (("maximum", "exclusiveMaximum"), min)):
        for name in names:
            given = [leaf[name] for leaf in (one, other) if name in leaf]
            found |= {name: tighter(given)} if given else {}
    return found


def number(leaf: Leaf) -> Leaf | None:
    """Return a leaf of numbers with one bound at most on each side; None if there are none."""
    low, above = leaf.get("minimum", -math.inf), leaf.get("exclusiveMinimum", -math.inf)
    high, below = leaf.get("maximum", math.inf), leaf.get("exclusiveMaximum", math.inf)
    if leaf["type"] == "integer":
        ends = [low if low == -math.inf else math.ceil(low), above if above == -math.inf else math.floor(above) + 1]
        low, above = max(ends), -math.inf
        ends = [high if high == math.inf else math.floor(high), below if below == math.inf else math.ceil(below) - 1]
        high, below = min(ends), math.inf
    if max(low, above) > min(high, below) or (max(low, above) == min(high, below) and (above >= low or below <= high)):
        return None
    found: Leaf = {"type": leaf["type"]}
    if max(low, above) > -math.inf:
        found |= {"exclusiveMinimum": above} if above >= low else {"minimum": low}
    if min(high, below) < math.inf:
        found |= {"exclusiveMaximum": below} if below <= high else {"maximum": high}
    return found


def _strings_met(one: Leaf, other: Leaf, _: References) -> Leaf | None:
    for name in ("pattern", "format"):
        if name in one and name in other and one[name] != other[name]:
            raise NotFollowedError(f"more than one {name} for a string")
    return sized({**one, **other}, one, other, ("minLength", "maxLength"))


def sized(both: Leaf, one: Leaf, other: Leaf, names: tuple[str, str]) -> Leaf | None:
    """Return ``both`` with the tighter of two bounds on each side; None if nothing is within them."""
    least, most = names
    low = max(one.get(least, 0), other.get(least, 0))
    high = min(one.get(most, math.inf), other.get(most, math.inf))
    rest = {name: value for name, value in both.items() if name not in names}
    found = rest | ({least: int(low)} if low else {}) | ({most: int(high)} if high < math.inf else {})
    return None if low > high else found


def _arrays_met(one: Leaf, other: Leaf, expand: References) -> Leaf | None:
    count = max(len(leaf.get("prefixItems", ())) for leaf in (one, other))
    first = [met(item(one, place), item(other, place), expand) for place in range(count)]
    rest = [leaf["items"] for leaf in (one, other) if "items" in leaf]
    both: Leaf = {"type": "array"}
    both |= {"prefixItems": first} if first else {}
    both |= {"items": _all_met(rest, expand)} if rest else {}
    bounds = {name: value for name, value in (one | other).items() if name in ("minItems", "maxItems")}
    return sized(both | bounds, one, other, ("minItems", "maxItems"))


def item(leaf: Leaf, place: int) -> Leaves:
    """Return the leaves of an entry of an array."""
    first: list[Leaves] = leaf.get("prefixItems", [])
    rest: Leaves = leaf.get("items", ANY)
    return first[place] if place < len(first) else rest


def _objects_met(one: Leaf, other: Leaf, expand: References) -> Leaf | None:
    names = dict.fromkeys([*one.get("properties", ()), *other.get("properties", ())])
    both: Leaf = {"type": "object"}
    if names:
        both["properties"] = {name: met(value(one, name, expand), value(other, name, expand), expand) for name in names}
    required = dict.fromkeys([*one.get("required", ()), *other.get("required", ())])
    both |= {"required": list(required)} if required else {}
    for keyword in ("additionalProperties", "propertyNames"):
        given = [leaf[keyword] for leaf in (one, other) if keyword in leaf]
        both |= {keyword: _all_met(given, expand)} if given else {}
    if patterns := _patterns_met(one, other, expand):
        both["patternProperties"] = patterns
    bounds = ("minProperties", "maxProperties")
    return sized(both, one, other, bounds)


def _patterns_met(one: Leaf, other: Leaf, expand: References) -> dict[str, Leaves]:
    mine, others = one.get("patternProperties", {}), other.get("patternProperties", {})
    if mine and others and {*mine} != {*others}:
        raise NotFollowedError("different patternProperties for one object,")
    found = {}
    for pattern in mine or others:
        left = mine[pattern] if mine else one.get("additionalProperties", ANY)
        right = others[pattern] if others else other.get("additionalProperties", ANY)
        found[pattern] = met(left, right, expand)
    return found


def value(leaf: Leaf, name: str, expand: References) -> Leaves:
    """Return the leaves of a property of an object, named or not."""
    named, found = leaf.get("properties", {}), ANY
    matching = [each for pattern, each in leaf.get("patternProperties", {}).items() if occurs(pattern, name)]
    for each in matching:
        found = met(found, each, expand)
    if name in named:
        return met(named[name], found, expand)
    return found if matching else leaf.get("additionalProperties", ANY)


_MEETINGS: dict[str, Callable[[Leaf, Leaf, References], Leaf | None]] = {
    "number": _numbers_met,
    "integer": _numbers_met,
    "string": _strings_met,
    "array": _arrays_met,
    "object": _objects_met,
}


# ---- values


def _chosen(values: list[Any], leaf: Leaf) -> list[Any]:
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
        return bool(_chosen([given], leaf))
    if not leaf:
        return True
    kind = type_of(given)
    if kind != leaf["type"] and (kind, leaf["type"]) != ("integer", "number"):
        return False
    rest = {name: bound for name, bound in leaf.items() if name not in ("type", UNMEANT)}
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
            return not _chosen(values, leaf)
        except NotFollowedError:
            return False
    kinds = {one["type"], other["type"]}
    if kinds <= {"number", "integer"}:
        return not _met(one, other, expand)
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
