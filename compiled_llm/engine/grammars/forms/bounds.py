"""Bounds on forms, checked before a library reads them: those recurse, and unfold repetitions."""

# Each look takes time in proportion to the text, and does not recurse itself. Brackets are counted as xgrammar reads
# them; text that its lexers refuse anyway may be counted otherwise.

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

MAX_CHARACTERS = 2**18  # of a form, as JSON, rules or a list of choices
MAX_LEVELS = 128  # brackets or groups inside one another, in JSON, patterns and rules
MAX_PATTERN = 2**16  # characters of a regular expression
MAX_GROUPS = 1000  # opening parentheses of a regular expression, wherever they stand: no reading of it has more levels
MAX_REPEATS = 256
"""Places of a regular expression that are optional or repeated: the time to compile grows with their cube."""
MAX_TIMES = 1_000_000  # how often something is repeated by number; numbers inside one another are multiplied
MAX_REFERENCED = 2**13
"""Different ``$ref`` times levels of the schema: how deep a reader may go that follows each of them once."""

_CLASS = r"\[(?:\\.|[^\]\\])*\]?"
_STRING = r'"(?:\\.|[^"\\\n])*"?'
_SOME, _TIMES = r"(?P<some>[*+?]\??)", r"(?P<times>\{[\d\s,]*\}\??|~[\d\s.]+)"
_JSON = re.compile(r'"(?:\\.|[^"\\])*"?|(?P<open>[\[{])|(?P<close>[\]}])', re.DOTALL)
_REGEX = re.compile(rf"\\.|{_CLASS}|(?P<open>\(\??)|(?P<close>\))|{_SOME}|{_TIMES}", re.DOTALL)
_EBNF = re.compile(rf"{_STRING}|#[^\n]*|{_CLASS}|(?P<open>\()|(?P<close>\))|{_TIMES}", re.DOTALL)
_LARK = re.compile(
    rf"{_STRING}|(?:#|//)[^\n]*|(?P<regex>/(?:\\.|{_CLASS}|[^/\\\[\n])+/?)"
    rf"|(?P<open>[(\[])|(?P<close>[)\]])|{_TIMES}",
    re.DOTALL,
)
"""The characters that open and close levels and repeats; those in strings, classes and comments do not. Each
matches what is not closed as well: to search on from inside would take the square of the time."""
_NUMBER = re.compile(r"\d+")


def check_length(text: str) -> None:
    _check(len(text), MAX_CHARACTERS, "characters")


def check_json(text: str) -> None:
    """Check JSON before it is parsed; ValueError if it is too long or too deep."""
    check_length(text)
    _check_marks(_JSON.finditer(text))


def check_pattern(pattern: str) -> None:
    """Check a regular expression; ValueError if it is too long, too deep, or repeats too much."""
    _check(len(pattern), MAX_PATTERN, "characters in a pattern")
    _check(pattern.count("("), MAX_GROUPS, "parentheses in a pattern")
    marks = list(_REGEX.finditer(pattern))
    repeats = sum(mark.lastgroup in ("some", "times") for mark in marks)
    _check(repeats, MAX_REPEATS, "repeats in a pattern")
    _check_marks(iter(marks))


def check_rules(rules: str) -> None:
    """Check a grammar in EBNF or Lark's form, and its patterns; ValueError if too long, too deep or too repetitive."""
    check_length(rules)
    _check_marks((_EBNF if "::=" in rules else _LARK).finditer(rules))


def check_parts(found: object) -> None:
    """Raise ValueError if JSON, or patterns and grammars in it, are too deep or too large."""
    # Patterns are looked for in each object, not only where a schema may have one: a ``$ref`` can lead anywhere.
    waiting, parts, levels = [(found, 1)], 0, 0
    references: set[str] = set()
    while waiting:
        part, level = waiting.pop()
        parts, levels = parts + 1, max(levels, level)
        _check(levels - 1, MAX_LEVELS, "levels, one inside the other")
        _check(parts, MAX_CHARACTERS, "parts")
        if isinstance(part, Mapping):
            _check_texts(part)
            if isinstance(part.get("$ref"), str):
                references.add(part["$ref"])
            waiting += [(value, level + 1) for value in part.values()]
        elif isinstance(part, (list, tuple)):
            waiting += [(value, level + 1) for value in part]
    _check(len(references) * levels, MAX_REFERENCED, "levels behind $ref, if each leads to another")


def _check_texts(part: Mapping[Any, Any]) -> None:
    patterns = part.get("patternProperties")
    for pattern in (part.get("pattern"), *(patterns if isinstance(patterns, Mapping) else ())):
        if isinstance(pattern, str):
            check_pattern(pattern)
    if isinstance(part.get("grammar"), str):
        check_rules(part["grammar"])


def _check_marks(marks: Iterator[re.Match[str]]) -> None:
    """Check how deep a text nests, and the product of its repetition counts."""
    times = [1]  # of each level that is open: the most that anything in it is repeated
    last, end = 1, -1  # of what has just ended, and where
    for mark in marks:
        kind, inner = mark.lastgroup, last if _is_blank(mark, end) else 1
        if kind == "open":
            times.append(1)
            end = -1
            _check(len(times) - 1, MAX_LEVELS, "levels, one inside the other")
            continue
        if kind == "close":
            last = times.pop() if len(times) > 1 else 1
        elif kind == "times":
            last = inner * _most(mark[kind])
        elif kind == "regex":
            check_pattern(mark[kind])
        else:
            last = inner if kind == "some" else 1
        end = mark.end()
        times[-1] = max(times[-1], last)
        _check(last, MAX_TIMES, "repeats, inside one another multiplied")


def _is_blank(mark: re.Match[str], end: int) -> bool:
    """Whether only blanks stand between ``end`` and a mark."""
    return end >= 0 and not mark.string[end : mark.start()].strip()


def _most(times: str) -> int:
    """Return the largest number of ``{n,m}``; of one with many digits a smaller one that is too large as well."""
    return max((int(number[:10]) for number in _NUMBER.findall(times)), default=1)


def _check(count: int, most: int, what: str) -> None:
    if count > most:
        raise ValueError(f"has {count:,} {what}; a form can have {most:,}")
