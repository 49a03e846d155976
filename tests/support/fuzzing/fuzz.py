"""Run the cases of many seeds, and say what was found, as small as it gets, so that it can be pasted and run."""

from __future__ import annotations

import dataclasses
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from support.fuzzing.case import Case
from support.fuzzing.data import Data, Prompt, default_of
from support.fuzzing.draws import unevenness
from support.fuzzing.playing import Played, play
from support.fuzzing.random_cases import random_case

MAX_TRIED = 300
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
        "\nfrom support.fuzzing.playing import play\nfrom support.fuzzing.random_cases import *\n\n"
        f"print(play({smallest!r}).difference)\n"
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


# ---- smaller cases


def shrink(case: Case, fails: Callable[[Case], bool], max_tried: int = MAX_TRIED) -> Case:
    """The smallest failing case that can be reached by making one thing smaller at a time."""
    candidates = _smaller(case)
    for _ in range(max_tried):
        candidate = next(candidates, None)
        if candidate is None:
            break
        if fails(candidate):
            case, candidates = candidate, _smaller(candidate)
    return case


def _smaller(value: Any) -> Iterator[Any]:
    """Each way to make one thing in it smaller, the largest first."""
    if isinstance(value, Prompt):
        yield from _of_prompt(value)
    elif isinstance(value, Data):
        yield from _of_data(value)
    elif isinstance(value, tuple):
        if len(value) > 1 and isinstance(value[-1], Data):
            yield from (value[-1:], value[len(value) // 2 :])
        yield from (value[:index] + value[index + 1 :] for index in range(len(value)) if isinstance(value[index], Data))
        for index, entry in enumerate(value):
            yield from ((*value[:index], less, *value[index + 1 :]) for less in _smaller(entry))
    elif isinstance(value, dict):
        yield from ({key: kept for key, kept in value.items() if key != name} for name in value)


def _of_data(data: Data) -> Iterator[Data]:
    for part in dataclasses.fields(data):  # type: ignore[arg-type]
        value, default = getattr(data, part.name), default_of(part)
        if part.name in ("family", "steps", "prompt") or value == default:
            continue
        yield dataclasses.replace(data, **{part.name: default})  # type: ignore[type-var]
    for part in dataclasses.fields(data):  # type: ignore[arg-type]
        for less in _smaller(getattr(data, part.name)):
            yield dataclasses.replace(data, **{part.name: less})  # type: ignore[type-var]


def _of_prompt(prompt: Prompt) -> Iterator[Prompt]:
    if len(prompt.lengths) > 1:
        for row in range(len(prompt.lengths)):
            yield dataclasses.replace(prompt, lengths=prompt.lengths[:row] + prompt.lengths[row + 1 :])
    for row, length in enumerate(prompt.lengths):
        if length > 1:
            shorter = (*prompt.lengths[:row], length // 2, *prompt.lengths[row + 1 :])
            yield dataclasses.replace(prompt, lengths=shorter)
    for name, value in (("holes", ()), ("period", 0), ("wrong", ""), ("padding", "left"), ("seed", 0)):
        if getattr(prompt, name) != value:
            yield dataclasses.replace(prompt, **{name: value})
