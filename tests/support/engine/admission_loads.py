"""Kinds of loads, as numbers alone: lengths of prompts and answers, when requests come, how many pages there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]
Drawn = Callable[[np.random.Generator, int], Numbers]

PAGE_SIZE = 16
MAX_NUM_SEQS = 256
UNKNOWN = 8192
"""``max_tokens`` of answers that end before."""


class Load(NamedTuple):
    """Requests in the order in which they come, as arrays ``[N]``, and the room that they have."""

    prompts: Numbers
    answers: Numbers
    max_tokens: Numbers  # those of ``answers`` if ``exact``
    exact: bool
    arrivals: Numbers  # in steps
    priorities: Numbers
    groups: Numbers  # whose prompts begin alike; -1 for those that begin as no other does
    shared: int  # tokens that those of a group begin with
    pages: int
    states: int | None  # entries for states of recurrent layers


class Kind(NamedTuple):
    """A kind of load."""

    answers: Drawn
    share: float  # of the pages that it would take at once
    exact: bool = False
    short: bool = False  # its prompts
    bursts: bool = False  # of requests, with priorities; else all come at once
    groups: int = 0
    states: int | None = None


def equal(rng: np.random.Generator, count: int) -> Numbers:
    return np.full(count, 512)


def uniform(rng: np.random.Generator, count: int) -> Numbers:
    return rng.integers(100, 1025, count)


def geometric(rng: np.random.Generator, count: int) -> Numbers:
    return np.minimum(rng.geometric(1 / 400, count), UNKNOWN)


def two_lengths(rng: np.random.Generator, count: int) -> Numbers:
    return rng.choice([10, 400], count)


KINDS = {
    "equal, exact, 3/4": Kind(equal, 3 / 4, exact=True),
    "equal, short prompts, 1/4": Kind(equal, 1 / 4, short=True),
    "uniform, exact, 3/4": Kind(uniform, 3 / 4, exact=True),
    "uniform, 3/4": Kind(uniform, 3 / 4),
    "uniform, 1/4": Kind(uniform, 1 / 4),
    "geometric, 3/4": Kind(geometric, 3 / 4),
    "geometric, 1/4": Kind(geometric, 1 / 4),
    "two lengths, short prompts, 3/4": Kind(two_lengths, 3 / 4, short=True),
    "two lengths, exact, 1/4": Kind(two_lengths, 1 / 4, exact=True),
    "bursts with priorities, 1/4": Kind(geometric, 1 / 4, bursts=True),
    "shared beginnings, 1/2": Kind(uniform, 1 / 2, groups=4),
    "states, 1/2": Kind(uniform, 1 / 2, states=300),
}


def drawn(name: str, seed: int, part: int = 0, count: int = 256) -> Load:
    """Return a load of a kind; another ``part`` has other lengths of the same distribution."""
    kind, rng = KINDS[name], np.random.default_rng([seed, part, sorted(KINDS).index(name)])
    answers, prompts = kind.answers(rng, count), rng.integers(*((20, 101) if kind.short else (100, 1025)), count)
    groups, shared = np.full(count, -1), 0
    if kind.groups:
        groups, shared = rng.integers(0, kind.groups, count), 2048
    pages = -(-(prompts + answers) // PAGE_SIZE)
    return Load(
        prompts + shared,
        answers,
        answers if kind.exact else np.full(count, UNKNOWN),
        kind.exact,
        np.sort(rng.integers(0, 4, count)) * 300 if kind.bursts else np.zeros(count, np.int64),
        rng.integers(0, 3, count) if kind.bursts else np.zeros(count, np.int64),
        groups,
        shared,
        int(kind.share * pages.sum()) + kind.groups * shared // PAGE_SIZE,
        kind.states,
    )
