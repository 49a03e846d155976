"""What attention is asked to compute: rows with so many new tokens and keys, and the bytes and the work of these."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

KINDS = ("decode", "prefill", "mixed", "shared")
SEED = 0


class Heads(NamedTuple):
    """H, K and D of a model."""

    query: int
    kv: int
    dim: int


class Row(NamedTuple):
    """New tokens of a row, and all of its keys, those of the new tokens included."""

    new: int
    keys: int


class Case(NamedTuple):
    """A batch. In a mixed one the rows that decode come first, and a chunk of a prompt last.

    Attributes:
        shared: keys that all rows begin with, in the same pages.
    """

    kind: str
    name: str
    rows: tuple[Row, ...]
    shared: int = 0

    @property
    def tokens(self) -> int:
        return sum(row.new for row in self.rows)

    @property
    def keys(self) -> int:
        return sum(row.keys for row in self.rows)

    def nbytes(self, heads: Heads, itemsize: int) -> int:
        """Return what has to move at least: keys and values of all rows, shared ones once, queries and results."""
        keys = self.keys - self.shared * (len(self.rows) - 1)
        return 2 * itemsize * heads.dim * (heads.kv * keys + heads.query * self.tokens)

    def flops(self, heads: Heads) -> int:
        """Return the work of both matrix products, a multiplication and an addition for each pair that is seen."""
        seen = sum(row.new * (row.keys - row.new) + row.new * (row.new + 1) // 2 for row in self.rows)
        return 4 * heads.dim * heads.query * seen


def cases_of(kinds: Sequence[str], quick: bool) -> list[Case]:
    """Return the cases of some kinds, or with ``quick`` a few of them; always the same."""
    makers = {"decode": decode_cases, "prefill": prefill_cases, "mixed": mixed_cases, "shared": shared_cases}
    return [case for kind in KINDS if kind in kinds for case in makers[kind](quick)]


def decode_cases(quick: bool) -> Iterator[Case]:
    """One new token a row: even lengths, random ones, and one long row among short ones."""
    for rows in (1, 8, 64, 256) if quick else (1, 8, 32, 64, 128, 192, 256):
        for keys in (607,) if quick else (100, 607, 1024, 2048, 8192):
            yield _decode(f"B={rows}, {keys} keys", [keys] * rows)
        if rows <= 8 and not quick:
            yield _decode(f"B={rows}, 32768 keys", [32_768] * rows)
        if rows == 8 or (rows > 1 and not quick):
            yield _decode(f"B={rows}, 8192 keys and 512", [8192] + [512] * (rows - 1))
        if rows == 64 or not quick:
            yield _decode(f"B={rows}, 100 to 2048 keys", _drawn(rows, 100, 2048))


def prefill_cases(quick: bool) -> Iterator[Case]:
    """Prompts, those whose beginning is cached, and batches of these."""
    for new in (512, 4096) if quick else (128, 512, 1024, 4096, 32_768):
        yield Case("prefill", f"B=1, {new} new", (Row(new, new),))
    for new, stored in ((128, 4096),) if quick else ((128, 4096), (1024, 32_768)):
        yield Case("prefill", f"B=1, {new} new after {stored}", (Row(new, stored + new),))
    lengths = _drawn(8, 16, 1024)
    yield Case("prefill", "B=8, 16 to 1024 new", tuple(Row(new, new) for new in lengths))
    if not quick:
        yield Case("prefill", "B=4, 64 to 512 new", tuple(Row(new, new) for new in (64, 128, 256, 512)))
        pairs = zip(lengths, _drawn(8, 0, 4096), strict=True)
        rows = tuple(Row(new, new + before) for new, before in pairs)
        yield Case("prefill", "B=8, 16 to 1024 new after 0 to 4096", rows)


def mixed_cases(quick: bool) -> Iterator[Case]:
    """Rows that decode, beside a chunk of a prompt."""
    few = ((8, 600, 256), (32, 2048, 512), (64, 600, 256))
    all_of_them = ((rows, keys, new) for rows in (8, 32, 64) for keys in (600, 2048) for new in (128, 256, 512, 1024))
    for rows, keys, new in few if quick else all_of_them:
        yield Case("mixed", f"B={rows}, {keys} keys, and {new} new", (*[Row(1, keys)] * rows, Row(new, new)))


def shared_cases(quick: bool) -> Iterator[Case]:
    """One new token a row, of rows that begin with the same keys; what comes after those is of random lengths."""
    for rows in (8, 64) if quick else (8, 64, 256):
        for shared in (2048,) if quick else (512, 2048, 8192):
            lengths = tuple(Row(1, shared + own) for own in _drawn(rows, 16, 600))
            yield Case("shared", f"B={rows}, {shared} shared keys, and 16 to 600", lengths, shared)


def smallest(kind: str) -> Case:
    """Return a case of a kind that is there only to be computed once, so that everything is built."""
    rows = {"decode": (Row(1, 20),) * 2, "prefill": (Row(20, 20),), "mixed": (Row(1, 20), Row(20, 20))}
    if kind == "shared":
        return Case(kind, "the smallest", (Row(1, 300), Row(1, 270)), shared=256)
    return Case(kind, "the smallest", rows[kind])


def _decode(name: str, lengths: Sequence[int]) -> Case:
    return Case("decode", name, tuple(Row(1, keys) for keys in lengths))


def _drawn(count: int, least: int, most: int) -> list[int]:
    numbers = random.Random(f"{SEED}, {count} of {least} to {most}")
    return [numbers.randint(least, most) for _ in range(count)]
