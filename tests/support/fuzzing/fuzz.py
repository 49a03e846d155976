"""Run the cases of many seeds, and say what was found so that it can be pasted and run."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

from support.fuzzing.case import Case
from support.fuzzing.draws import unevenness
from support.fuzzing.playing import Played, play
from support.fuzzing.random_cases import random_case
from support.fuzzing.shrinking import MAX_TRIED, shrink

UNLIKELY = 8.0
"""How uneven draws may be: once in a hundred million runs by chance."""


@dataclass
class Tally:
    """What came of many cases."""

    cases: int = 0
    undecided: int = 0
    served: int = 0
    refused: int = 0
    places: list[float] = field(default_factory=list)

    def add(self, played: Played) -> None:
        self.cases += 1
        self.undecided += played.undecided
        self.served += played.served
        self.refused += played.refused
        self.places += played.places

    def __str__(self) -> str:
        return (
            f"{self.cases} cases, {self.served} calls and changes compared, {self.refused} refused, {self.undecided} "
            f"ended where rounding decides; {len(self.places)} draws, uneven at 1e-{unevenness(self.places):.1f}"
        )


class DifferenceError(AssertionError):
    """A wrapped model is not what its twin is."""


def fuzz(seeds: Iterator[int], steps: int, mode: str) -> Tally:
    """Play the cases of these seeds.

    Raises:
        DifferenceError: a wrapped model differs from its twin; the message has the smallest case that shows it.
    """
    tally = Tally()
    seed = first_difference(seeds, steps, mode, tally)
    if seed is not None:
        raise DifferenceError(report(seed, steps, mode))
    if unevenness(tally.places) > UNLIKELY:
        raise DifferenceError(f"sampled tokens have another distribution than HuggingFace's: {tally}")
    return tally


def first_difference(seeds: Iterator[int], steps: int, mode: str, tally: Tally) -> int | None:
    """Play cases up to the first one in which a wrapped model differs, and return its seed."""
    for seed in seeds:
        print(seed, end=" ", flush=True)  # a crash has its seed before it
        with quiet():
            played = play(random_case(seed, steps, mode=mode))
        tally.add(played)
        if played.differs:
            return seed
    return None


def report(seed: int, steps: int, mode: str, max_tried: int = MAX_TRIED) -> str:
    """What a person pastes and runs."""
    case = random_case(seed, steps, mode=mode)
    with quiet():
        case = replace(case, steps=case.steps[: play(case).step + 1])
        smallest = shrink(case, _differs, max_tried)
        played = play(smallest)
    return (
        f"{played.difference}\n\nThe whole case:\n\n    pytest tests/fuzz --fuzz-seed={seed} --fuzz-cases=1 "
        f"--fuzz-steps={steps} --fuzz-mode={mode}\n\nThe smallest (step {played.step} differs), to be run in tests/:\n"
        f"\nfrom support.fuzzing.all import *\n\nprint(play({smallest!r}).difference)\n"
    )


def _differs(smaller: Case) -> bool:
    with suppress(Exception):  # no model has what is left of the config
        return play(smaller).differs
    return False


@contextmanager
def quiet() -> Iterator[None]:
    """Cases make calls that HuggingFace and we warn about, over and over."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def seeds_from(first: int, count: int | None, seconds: float) -> Iterator[int]:
    """``count`` seeds, then more until the time is up."""
    end, seed = time.monotonic() + seconds, first
    while seed < first + (count or 0) or time.monotonic() < end:
        yield seed
        seed += 1
