"""A table, and how figures are written in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from compiled_llm.commands.bench.timing import Percentiles, Spread


@dataclass
class Table:
    """A table with a title.

    Attributes:
        title: what it shows.
        columns: their heads.
        rows: cells, as many in each row as there are columns.
        note: a sentence to follow it.
        leading: how many columns are names rather than figures.
    """

    title: str
    columns: Sequence[str]
    rows: list[list[str]] = field(default_factory=list)
    note: str = ""
    leading: int = 1


def number(value: float) -> str:
    """Return a figure with three digits or so."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def share(value: float) -> str:
    """Return a share in percent, with one digit that says something."""
    return f"{value:.0%}" if value >= 0.01 else f"{100 * value:.1g}%"


def pair(spread: Spread, scale: float = 1.0) -> str:
    """Return the best and the median."""
    return f"{number(spread.best * scale)} / {number(spread.median * scale)}"


def percentiles(times: Percentiles) -> str:
    """Return half of all / 99 of 100, in ms."""
    return f"{number(times.p50 * 1e3)} / {number(times.p99 * 1e3)}"


def sentence(words: str) -> str:
    """Return words that begin a line."""
    return words[:1].upper() + words[1:]
