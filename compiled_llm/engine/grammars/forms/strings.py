"""Strings of a schema in xgrammar's rules: they may have escapes, and long ones are counted in blocks."""

# By itself, xgrammar leaves out of bounded strings and of patterns whatever JSON has to escape. Its rules, as it prints
# them, show both. A pattern without its mark matches JSON's text as it stands, and ours are written for that. Ends when
# xgrammar counts an escape as a character, and reads patterns for what JSON's text means.

from __future__ import annotations

import json
import re

from compiled_llm.engine.grammars.forms.patterns import STAND_IN, any_characters

_PATTERN = re.compile(r'^(\S+ ::= Regex\(".*"), json_string=true\)$', re.MULTILINE)
_BOUNDED = re.compile(
    r'^(?P<name>\S+) ::= \(\("\\"" (?P=name)_characters\{(?P<least>\d+), (?P<most>-?\d+)\} "\\""\)\)$', re.MULTILINE
)
"""Rules of a pattern and of a bounded string, as xgrammar prints them."""
_STAND_IN = STAND_IN.replace("\\", r"\\")
_BLOCK = 64  # characters of a block: an automaton has a state for each, and few tokens have as many
_SHORT = 128  # characters that need no blocks: xgrammar 0.2.8 fails on a pattern with more
_BLOCK_RULE = "characters_of_a_block"


def has_strings(schema: str) -> bool:
    """Whether a schema may have patterns or bounded strings."""
    return '"pattern' in schema or 'Length"' in schema


def with_escapes(rules: str) -> str:
    """Return xgrammar's rules with strings that may have escapes."""
    needed: dict[str, str] = {}
    found = _BOUNDED.sub(lambda rule: _bounded(rule, needed), _PATTERN.sub(_pattern, rules))
    return "\n".join([found, *(f"{name} ::= {body}" for name, body in needed.items())])


def _pattern(rule: re.Match[str]) -> str:
    return rule[1].replace(_STAND_IN, ")") + ")"


def _bounded(rule: re.Match[str], needed: dict[str, str]) -> str:
    least, most = int(rule["least"]), int(rule["most"])
    return rf'{rule["name"]} ::= "\"" ({_characters(least, None if most < 0 else most, needed)}) "\""'


def _characters(least: int, most: int | None, needed: dict[str, str]) -> str:
    """Return a rule's body of so many characters; other rules that it names are added to ``needed``."""
    if max(least, most or 0) <= _SHORT:
        return _needed(least, most, needed)
    first, begun = divmod(least, _BLOCK)
    if most is None:
        return _blocks(first, first, begun, None, needed)
    last, rest = divmod(most, _BLOCK)
    if first == last:
        return _blocks(first, first, begun, most - first * _BLOCK, needed)
    ways = [_blocks(first, first, begun, _BLOCK - 1, needed)]
    if first + 1 < last:
        ways.append(_blocks(first + 1, last - 1, 0, _BLOCK - 1, needed))
    return " | ".join([*ways, _blocks(last, last, 0, rest, needed)])


def _blocks(least: int, most: int, begun: int, end: int | None, needed: dict[str, str]) -> str:
    """Return so many blocks, and ``begun`` to ``end`` characters after them."""
    after = _needed(begun, end, needed)
    if not most:
        return after
    needed[_BLOCK_RULE] = f"{_regex(_BLOCK, _BLOCK)} (={_needed(0, _BLOCK, needed)})"
    return f"{_BLOCK_RULE}{{{least},{most}}} {after}"


def _needed(least: int, most: int | None, needed: dict[str, str]) -> str:
    name = f"characters_{least}_to_{'' if most is None else most}"
    needed[name] = _regex(least, most)
    return name


def _regex(least: int, most: int | None) -> str:
    return f"Regex({json.dumps(any_characters(least, most))})"
