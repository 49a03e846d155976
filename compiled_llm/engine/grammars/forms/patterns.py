"""Patterns of strings, rewritten for the text of JSON, where a character may be an escape."""

# JSON Schema writes patterns as ECMAScript does. They are read into a tree of sets of characters, and written as
# patterns over JSON's text in the part of that language that xgrammar compiles into one automaton, in ASCII. An answer
# matches a pattern as a whole.

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from compiled_llm.engine.grammars.forms.keywords import NotFollowedError

Ranges = tuple[tuple[int, int], ...]  # characters, by code points: each range with its ends, in order and apart

MAX_UNFOLDED = 2**13  # characters of a pattern whose repeats are written out: an automaton has a state for each
_LONGEST = 256  # characters of a name or a value that a pattern is compared with
_LAST = 0x10FFFF
_AT_ONCE = 100  # repeats that are written as one number: xgrammar 0.2.8 fails on more than 128


# ---- sets of characters


def _united(ranges: Sequence[tuple[int, int]]) -> Ranges:
    united: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if united and low <= united[-1][1] + 1:
            united[-1] = (united[-1][0], max(high, united[-1][1]))
        else:
            united.append((low, high))
    return tuple(united)


def _others(ranges: Ranges) -> Ranges:
    """Return all characters but these."""
    edges = [-1, *(edge for low, high in ranges for edge in (low, high)), _LAST + 1]
    gaps = [(edges[n] + 1, edges[n + 1] - 1) for n in range(0, len(edges), 2)]
    return tuple((low, high) for low, high in gaps if low <= high)


def _has(ranges: Ranges, code: int) -> bool:
    return any(low <= code <= high for low, high in ranges)


def _common(ranges: Ranges, others: Ranges) -> Ranges:
    return _others(_united([*_others(ranges), *_others(others)]))


ANY: Ranges = ((0, _LAST),)
_DIGITS = _united([(48, 57)])
_WORD = _united([(48, 57), (65, 90), (95, 95), (97, 122)])
_BLANKS = _united(
    [
        *((9, 13), (32, 32), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F)),
        *((0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
    ]
)
_LINE_ENDS = _united([(10, 10), (13, 13), (0x2028, 0x2029)])
_CLASSES = {"d": _DIGITS, "w": _WORD, "s": _BLANKS}
_CLASSES |= {name.upper(): _others(ranges) for name, ranges in _CLASSES.items()}
_CONTROLS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "0": 0}


# ---- the tree


@dataclass(frozen=True)
class Chars:
    """One character of a set."""

    ranges: Ranges


@dataclass(frozen=True)
class Edge:
    """The begin or the end of the text: ``^`` or ``$``."""

    sign: str


@dataclass(frozen=True)
class Chain:
    """One part after the other."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Either:
    """One of several parts."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    """A part, ``least`` to ``most`` times; None for any number of times."""

    part: Node
    least: int
    most: int | None


Node = Chars | Edge | Chain | Either | Repeat
_NOTHING = Chain(())


def parse(pattern: str) -> Node:
    """Return the tree of a pattern, which the whole text has to match; NotFollowedError if no grammar can follow it."""
    node = _without_edges(_PatternReader(pattern).read(), first=True, last=True)
    if _unfolded(node) > MAX_UNFOLDED:
        raise NotFollowedError(
            f"a pattern that repeats so much that it unfolds to more than {MAX_UNFOLDED:,} characters"
        )
    return node


class _PatternReader:
    """A reader of a pattern from left to right."""

    def __init__(self, pattern: str) -> None:
        self._pattern, self._at = pattern, 0

    def read(self) -> Node:
        node = self._either()
        if self._at < len(self._pattern):
            self._refuse("a parenthesis that closes nothing")
        return node

    def _refuse(self, what: str) -> NoReturn:
        raise NotFollowedError(f"a pattern with {what} at character {self._at}")

    def _take(self, text: str) -> bool:
        found = self._pattern.startswith(text, self._at)
        self._at += len(text) if found else 0
        return found

    def _match(self, regex: str) -> re.Match[str] | None:
        found = re.compile(regex).match(self._pattern, self._at)
        self._at = self._at if found is None else found.end()
        return found

    def _next(self) -> str:
        if self._at == len(self._pattern):
            self._refuse("something that is not closed")
        self._at += 1
        return self._pattern[self._at - 1]

    def _either(self) -> Node:
        parts = [self._sequence()]
        while self._take("|"):
            parts.append(self._sequence())
        return parts[0] if len(parts) == 1 else Either(tuple(parts))

    def _sequence(self) -> Node:
        parts: list[Node] = []
        while self._at < len(self._pattern) and self._pattern[self._at] not in "|)":
            parts.append(self._repeated(self._atom()))
        return parts[0] if len(parts) == 1 else Chain(tuple(parts))

    def _repeated(self, part: Node) -> Node:
        found = self._match(r"([*+?])|\{(\d+)(,?)(\d*)\}")
        if found is None:
            return part
        sign, least, comma, most = found.groups()
        if self._match(r"[*+]") or isinstance(part, Edge):
            self._refuse("a repeat of what cannot be repeated")
        self._take("?")  # how it is searched does not change what matches
        if sign:
            return Repeat(part, int(sign == "+"), 1 if sign == "?" else None)
        bounds = int(least), (int(most) if most else None) if comma else int(least)
        if bounds[1] is not None and bounds[0] > bounds[1]:
            self._refuse("a repeat of more times than it may be")
        return Repeat(part, *bounds)

    def _atom(self) -> Node:
        sign = self._next()
        if sign == "(":
            return self._group()
        if sign == "[":
            return Chars(self._class())
        if sign in "^$":
            return Edge(sign)
        if sign == ".":
            return Chars(_others(_LINE_ENDS))
        if sign == "\\":
            return Chars(self._escape())
        if sign in "*+?" or (sign == "{" and re.compile(r"\d*,?\d*\}").match(self._pattern, self._at)):
            self._refuse("a repeat of nothing")
        return Chars(_of(ord(sign)))

    def _group(self) -> Node:
        if self._take("?") and not (self._take(":") or self._match(r"P?<[A-Za-z_]\w*>")):
            self._refuse("a lookaround or a flag, (?...),")
        node = self._either()
        if not self._take(")"):
            self._refuse("a parenthesis that is not closed")
        return node

    def _class(self) -> Ranges:
        negated = self._take("^")
        ranges: list[tuple[int, int]] = []
        if self._take("]"):
            self._refuse("an empty class of characters")
        while not self._take("]"):
            low = self._class_part()
            if self._pattern.startswith("-", self._at) and not self._pattern.startswith("-]", self._at):
                self._at += 1
                low = self._range(low, self._class_part())
            ranges += low
        found = _united(ranges)
        return _others(found) if negated else found

    def _class_part(self) -> Ranges:
        sign = self._next()
        if sign == "\\":
            return _of(8) if self._take("b") else self._escape()
        return _of(ord(sign))

    def _range(self, low: Ranges, high: Ranges) -> Ranges:
        ends = {len(low), len(high), low[0][1] - low[0][0] + 1, high[0][1] - high[0][0] + 1}
        if ends != {1} or low[0][0] > high[0][0]:
            self._refuse("a range of characters that is none")
        return ((low[0][0], high[0][0]),)

    def _escape(self) -> Ranges:
        """Return what an escape stands for, after its backslash."""
        if found := self._match(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|u\{([0-9A-Fa-f]{1,6})\}"):
            return self._code(int(next(filter(None, found.groups())), 16))
        sign = self._next()
        if sign in _CLASSES:
            return _CLASSES[sign]
        if sign in _CONTROLS and not (sign == "0" and self._match(r"\d")):
            return _of(_CONTROLS[sign])
        if sign.isalnum():
            self._refuse(f"the escape \\{sign}")
        return _of(ord(sign))

    def _code(self, code: int) -> Ranges:
        if 0xD800 <= code < 0xDC00 and (found := self._match(r"\\u([Dd][C-Fc-f][0-9A-Fa-f]{2})")):
            code = 0x10000 + ((code - 0xD800) << 10) + int(found[1], 16) - 0xDC00
        if code > _LAST:
            self._refuse("a character that there is not")
        return _of(code)


def _of(code: int) -> Ranges:
    return ((code, code),)


def _without_edges(node: Node, first: bool, last: bool) -> Node:
    """Return a tree without its edges, which stand at the ``first`` and the ``last`` place of the text alone."""
    if isinstance(node, Edge):
        if not (first if node.sign == "^" else last):
            raise NotFollowedError("a pattern with ^ or $ in the middle")
        return _NOTHING
    if isinstance(node, Either):
        return Either(tuple(_without_edges(part, first, last) for part in node.parts))
    if isinstance(node, Repeat):
        return Repeat(_without_edges(node.part, first=False, last=False), node.least, node.most)
    if isinstance(node, Chars):
        return node
    marks = [isinstance(part, Edge) for part in node.parts]
    return Chain(
        tuple(
            _without_edges(part, first and all(marks[:number]), last and all(marks[number + 1 :]))
            for number, part in enumerate(node.parts)
        )
    )


# ---- what matches


def occurs(pattern: str, text: str) -> bool:
    """Whether a pattern matches part of a text, as JSON Schema reads it, linear in both, as nothing is tried twice."""
    parse(pattern)
    if len(text) > _LONGEST:
        raise NotFollowedError(f"a pattern beside a text of more than {_LONGEST:,} characters")
    return bool(_ends(_PatternReader(pattern).read(), text, set(range(len(text) + 1))))


def _ends(node: Node, text: str, begins: set[int]) -> set[int]:
    """Return where a part of a text that matches may end, if it begins at one of these places."""
    if isinstance(node, Chars):
        return {at + 1 for at in begins if at < len(text) and _has(node.ranges, ord(text[at]))}
    if isinstance(node, Edge):
        return begins & {0 if node.sign == "^" else len(text)}
    if isinstance(node, Either):
        return set().union(*(_ends(part, text, begins) for part in node.parts))
    if isinstance(node, Chain):
        for part in node.parts:
            begins = _ends(part, text, begins)
        return begins
    for _ in range(node.least):
        begins = _ends(node.part, text, begins)
    found, more = begins, begins
    for _ in range(len(text) if node.most is None else node.most - node.least):
        more = _ends(node.part, text, more) - found
        if not more:
            break
        found = found | more
    return found


# ---- how long texts are


def _unfolded(node: Node) -> int:
    """Return how many sets of characters a tree has if its repeats are written out."""
    if isinstance(node, Repeat):
        return _unfolded(node.part) * max(1, node.least if node.most is None else node.most)
    return sum(map(_unfolded, node.parts)) if isinstance(node, (Chain, Either)) else 1


def lengths(node: Node) -> tuple[int, int | None]:
    """Return how many characters texts have, at least and at most; None for any number."""
    if isinstance(node, Chars):
        return 1, 1
    if isinstance(node, Repeat):
        least, most = lengths(node.part)
        return least * node.least, 0 if most == 0 else _product(most, node.most)
    parts = [lengths(part) for part in node.parts] if isinstance(node, (Chain, Either)) else []
    mosts = [most for _, most in parts if most is not None]
    whole = len(mosts) == len(parts)
    if isinstance(node, Either):
        return min(least for least, _ in parts), max(mosts) if whole else None
    return sum(least for least, _ in parts), sum(mosts) if whole else None


def _product(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one * other


def limit_length(node: Node, low: int, high: int | None) -> Node | None:
    """Return the tree of texts that also have ``low`` to ``high`` characters; NotFollowedError if that is hard."""
    least, most = lengths(node)
    if (high is not None and least > high) or (most is not None and most < low):
        return None
    if least >= low and (high is None or (most is not None and most <= high)):
        return node
    if isinstance(node, Either):
        parts = [part for each in node.parts if (part := limit_length(each, low, high)) is not None]
        return Either(tuple(parts)) if parts else None
    if isinstance(node, Chain):
        return _limit_part(node, low, high)
    if isinstance(node, Repeat) and (width := _width(node.part)):
        fewest = max(node.least, -(-low // width))
        limits = [limit for limit in (node.most, None if high is None else high // width) if limit is not None]
        if limits and fewest > min(limits):
            return None
        return Repeat(node.part, fewest, min(limits, default=None))
    raise NotFollowedError("a pattern beside minLength or maxLength, of which it does not say itself how they meet,")


def _width(node: Node) -> int:
    """Return how many characters each text has; 0 if that differs."""
    least, most = lengths(node)
    return least if least == most else 0


def _limit_part(node: Chain, low: int, high: int | None) -> Node | None:
    """Return a sequence of which one part alone varies in length, with that one bounded."""
    varying = [number for number, part in enumerate(node.parts) if len(set(lengths(part))) == 2]
    if len(varying) != 1:
        raise NotFollowedError("a pattern beside minLength or maxLength, of which several parts vary in length,")
    (number,) = varying
    rest = sum(lengths(part)[0] for part in node.parts) - lengths(node.parts[number])[0]
    part = limit_length(node.parts[number], max(0, low - rest), None if high is None else high - rest)
    return None if part is None else Chain((*node.parts[:number], part, *node.parts[number + 1 :]))


# ---- as JSON writes it

_HEX = "[0-9A-Fa-f]"
_PAIR = rf"[Dd][89ABab]{_HEX}{{2}}\\u[Dd][C-Fc-f]{_HEX}{{2}}"
_HALVES = _united([(0xD800, 0xDFFF)])
CHARACTER = (
    r"(?:[^\x22\x5c\x00-\x1f]|\\(?:[\x22\x5c\x2fbfnrt]"
    rf"|u(?:[0-9A-CEFa-cef]{_HEX}{{3}}|[Dd][0-7]{_HEX}{{2}}|{_PAIR})))"
)
"""Matches any one character in a string of JSON; half a pair of UTF-16 is none."""
STAND_IN = r"|\u{10fffd})"
"""Ends a pattern of which xgrammar, which leaves escapes out, would find nothing; it is taken out later."""
_SHORT = {0x22: r"\x22", 0x5C: r"\x5c", 0x2F: r"\x2f", 8: "b", 12: "f", 10: "n", 13: "r", 9: "t"}
_NOT_RAW = _united([(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C), *_HALVES])
_BY_NUMBER = _common(_united([(0, 0x1F), (0x7F, 0xFFFF)]), _others(_HALVES))
"""Characters that may be written by their number: those that have to, and those outside of ASCII."""


def any_characters(least: int, most: int | None) -> str:
    """Return a pattern, over JSON's text, of so many characters; None for any number."""
    return f"{CHARACTER}{{{least},{'' if most is None else most}}}"


def render(node: Node) -> str:
    """Return a tree as a pattern over JSON's text, with ``STAND_IN`` if it only matches texts with escapes."""
    text = _render(node) or "(?:)"
    return text if is_raw(node) else f"(?:{text}{STAND_IN}"


def is_raw(node: Node) -> bool:
    """Whether a text without escapes matches."""
    if isinstance(node, Chars):
        return bool(_common(node.ranges, _others(_NOT_RAW)))
    if isinstance(node, Repeat):
        return not node.least or is_raw(node.part)
    if isinstance(node, Either):
        return any(map(is_raw, node.parts))
    return not isinstance(node, Chain) or all(map(is_raw, node.parts))


def _render(node: Node) -> str:
    if isinstance(node, Chars):
        return _characters(node.ranges)
    if isinstance(node, Repeat):
        return _times(_render(node.part), node.least, node.most)
    if isinstance(node, Either):
        return f"(?:{'|'.join(map(_render, node.parts))})"
    parts = list(filter(None, map(_render, node.parts))) if isinstance(node, Chain) else []
    return parts[0] if len(parts) == 1 else f"(?:{''.join(parts)})" if parts else ""


def _times(text: str, least: int, most: int | None) -> str:
    """Return a pattern repeated, by numbers that xgrammar takes."""
    if most == least:
        return _exactly(text, least)
    begin = _exactly(text, least)
    if most is None:
        return f"(?:{begin}{text}*)"
    if (more := most - least) <= _AT_ONCE:
        return f"(?:{begin}{text}{{0,{more}}})"
    whole, rest = divmod(more, _AT_ONCE)
    block = _exactly(text, _AT_ONCE)
    some = f"{_times(block, 0, whole - 1)}{text}{{0,{_AT_ONCE - 1}}}"
    return f"(?:{begin}(?:{some}|{_exactly(block, whole)}{text}{{0,{rest}}}))"


def _exactly(text: str, times: int) -> str:
    whole, rest = divmod(times, _AT_ONCE)
    blocks = _exactly(f"(?:{text}{{{_AT_ONCE}}})", whole) if whole else ""
    if not rest:
        return blocks
    return f"(?:{blocks}{text}{{{rest}}})" if whole or rest > 1 else text


def _characters(ranges: Ranges) -> str:
    if ranges == ANY:
        return CHARACTER
    raw = _common(ranges, _others(_NOT_RAW))
    numbers = _common(ranges, _BY_NUMBER)
    escaped = "".join(text for code, text in _SHORT.items() if _common(ranges, _of(code)))
    ways = [f"[{escaped}]"] if escaped else []
    codes = [text for low, high in numbers for text in _hex(low, high, 4)]
    if _common(ranges, ((0x10000, _LAST),)) == ((0x10000, _LAST),):
        codes.append(_PAIR)
    if codes:
        ways.append(f"u(?:{'|'.join(codes)})")
    either = [_class_text(raw)] if raw else []
    if ways:
        either.append(rf"\\(?:{'|'.join(ways)})")
    if not either:
        raise NotFollowedError("a pattern with a character that no text has")
    return either[0] if not ways else f"(?:{'|'.join(either)})"


def _class_text(ranges: Ranges) -> str:
    return "[" + "".join(_sign(low) if low == high else f"{_sign(low)}-{_sign(high)}" for low, high in ranges) + "]"


def _sign(code: int) -> str:
    if chr(code).isalnum() and code < 0x80:
        return chr(code)
    return rf"\x{code:02x}" if code < 0x80 else rf"\u{code:04x}" if code < 0x10000 else rf"\u{{{code:x}}}"


def _hex(low: int, high: int, digits: int) -> list[str]:
    """Return patterns of the numbers from one to another, written with so many digits of base 16."""
    if low == 0 and high == 16**digits - 1:
        return [f"{_HEX}{{{digits}}}"] if digits else [""]
    unit = 16 ** (digits - 1)
    (first, begin), (last, end) = divmod(low, unit), divmod(high, unit)
    if first == last:
        return [_digit(first, last) + rest for rest in _hex(begin, end, digits - 1)]
    found: list[str] = []
    if begin:
        found += [_digit(first, first) + rest for rest in _hex(begin, unit - 1, digits - 1)]
        first += 1
    if end < unit - 1:
        found += [_digit(last, last) + rest for rest in _hex(0, end, digits - 1)]
        last -= 1
    if first <= last:
        found.append(_digit(first, last) + _hex(0, unit - 1, digits - 1)[0])
    return found


def _digit(low: int, high: int) -> str:
    """Return a class of the digits from one to another, large and small."""
    first, last = f"{low:x}", f"{high:x}"
    if low == high < 10:
        return first
    if high < 10:
        return f"[{first}-{last}]"
    letters = f"{max(first, 'a')}-{last}"
    return f"[{f'{first}-9' if low < 10 else ''}{letters.upper()}{letters}]"


# ---- names


def other_names(names: Sequence[str]) -> str:
    """Return a pattern, over JSON's text, of all strings but these."""

    def others(left: list[str]) -> str:
        heads = dict.fromkeys(name[0] for name in left if name)
        diverging = _others(_united([(ord(head), ord(head)) for head in heads]))
        ways = [_characters(diverging) + CHARACTER + "*"] if heads else [CHARACTER + "+"]
        rests = {head: [name[1:] for name in left if name[:1] == head] for head in heads}
        ways += [_characters(_of(ord(head))) + others(rest) for head, rest in rests.items()]
        if "" not in left:
            ways.append("")
        return f"(?:{'|'.join(ways)})"

    return others(list(names))
