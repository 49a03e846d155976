"""Play a case on a wrapped model and on its twin, step by step, until something differs."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from support.fuzzing.calls import Generate
from support.fuzzing.case import Case, nudged
from support.fuzzing.data import Step
from support.fuzzing.draws import Draws
from support.fuzzing.refusals import may_refuse, may_serve
from support.fuzzing.side import Outcome, Raised, Side, difference, state_at_rest

NUDGES = 4
PLANTED = ("PlantedError", "KeyboardInterrupt")
"""What callbacks raise."""


@dataclass
class Played:
    """What came of a case."""

    step: int = 0  # the last one that was played
    difference: str | None = None  # where it differed; None if nothing did
    undecided: bool = False  # HuggingFace's own result changes as well if its weights move by one part in a million
    served: int = 0  # how many steps gave results on both sides
    refused: int = 0  # how many of them only the wrapped model raised for
    places: list[float] = field(default_factory=list)  # where drawn tokens lie in HuggingFace's distribution

    @property
    def differs(self) -> bool:
        """Whether the wrapped model is at fault."""
        return self.difference is not None and not self.undecided


def play(case: Case) -> Played:
    """Play a case, up to its first difference."""
    played, past = Played(), list[Past]()
    ours, theirs = case.sides()
    for played.step, step in enumerate(case.steps):
        outcome = _run(step, ours)
        tokens = _drawn(step, outcome, ours)
        draws = _draws(step, tokens, ours)
        expected = _run(step, theirs, draws)
        refused = outcome.raised is not None and expected.raised is None
        found = _difference(step, ours, outcome, expected)
        impossible = draws is not None and draws.impossible != []
        if draws is not None and impossible and not found:
            found = draws.impossible[0]
        past.append(Past(tokens, bool(outcome.raised or expected.raised)))
        if past[-1].failed:
            ours.chat = theirs.chat = None  # what a failed call leaves in a cache is not promised
        played.difference = found or _wrong_account(ours)
        if played.difference:
            both = not outcome.raised and not expected.raised
            played.undecided = both and bool(found) and _undecided(case, expected, past, impossible)
            return played
        played.served += not outcome.raised and not expected.raised
        played.refused += refused
        played.places += draws.places if draws is not None else []
    ours.chat = None
    played.difference = _wrong_account(ours)
    return played


def _run(step: Step, side: Side, draws: Draws | None = None) -> Outcome:
    side.log = []
    try:
        with nullcontext() if draws is None else draws.forced():
            result = step.run(side)
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, KeyboardInterrupt) and not step.interrupts:
            raise
        result = Raised(type(error).__name__, str(error))
    return Outcome(result, side.log, state_at_rest(side))


def _drawn(step: Step, outcome: Outcome, side: Side) -> Tensor | None:
    """``[B, T]`` new tokens, if random numbers of our own chose them."""
    if not step.draws(side) or outcome.raised or not isinstance(outcome.result, dict):
        return None
    result = outcome.result["result"]
    sequences: Tensor = result["sequences"] if isinstance(result, dict) else result
    return sequences[:, outcome.result["prompt"] :]


def _draws(step: Step, tokens: Tensor | None, side: Side) -> Draws | None:
    return Draws(tokens, step.pad(side), step.seed) if isinstance(step, Generate) and tokens is not None else None


def _difference(step: Step, ours: Side, outcome: Outcome, expected: Outcome) -> str | None:
    at_rest = difference(outcome.at_rest, expected.at_rest, "at rest")
    if outcome.raised and expected.raised:
        return at_rest or _of_errors(step, ours, outcome, expected)
    if outcome.raised and _is_planted(step, outcome.raised) and step.draws(ours):
        return at_rest  # HuggingFace drew other tokens, and has perhaps ended before
    if outcome.raised:
        return at_rest or (None if may_refuse(step, ours, outcome.raised) else f"raises {outcome.raised}")
    if expected.raised:
        return at_rest or (None if may_serve(expected.raised) else f"HuggingFace raises {expected.raised}")
    return difference(outcome.result, expected.result, "result") or _of_seen(outcome, expected) or at_rest


def _is_planted(step: Step, raised: Raised) -> bool:
    return raised.kind in PLANTED or (isinstance(step, Generate) and step.infinite)


def _of_errors(step: Step, side: Side, outcome: Outcome, expected: Outcome) -> str | None:
    ours, theirs = outcome.raised, expected.raised
    assert ours is not None
    assert theirs is not None
    if ours.kind == "ValueError" and ours.kind != theirs.kind:
        return None  # checked earlier, with a message of our own
    if ours.kind != theirs.kind and "meta tensor" not in theirs.message:
        return f"raises {ours}, HuggingFace {theirs}"
    return _of_seen(outcome, expected) if theirs.kind in PLANTED and not step.draws(side) else None


def _of_seen(outcome: Outcome, expected: Outcome) -> str | None:
    return difference(outcome.seen, expected.seen, "seen by callbacks and hooks")


def _wrong_account(ours: Side) -> str | None:
    """What does not add up in the account of pages, or is not given back; None if nothing."""
    pages = ours.model.compiled.stats().pages if ours.wrapped else None
    if pages is not None and ours.chat is None and pages.used:
        gc.collect()
        pages = ours.model.compiled.stats().pages
    if pages is None:
        return None
    if pages.used + pages.free + pages.cached != pages.total:
        return f"the account of pages does not add up: {pages}"
    if ours.chat is not None:
        return None
    promised = pages.free + pages.cached - ours.model.compiled.model_runner().pool.available
    return f"pages are still in use: {pages}" if pages.used else f"{promised} pages stay promised" if promised else None


class Past(NamedTuple):
    """What a step that has been played leaves for those who play it again: tokens drawn, and whether it failed."""

    drawn: Tensor | None
    failed: bool


def _undecided(case: Case, expected: Outcome, past: Sequence[Past], impossible: bool) -> bool:
    return any(_nudged_differs(case, expected, past, impossible, seed) for seed in range(NUDGES))


def _nudged_differs(case: Case, expected: Outcome, past: Sequence[Past], impossible: bool, seed: int) -> bool:
    """Whether HuggingFace itself comes to another result with weights that differ in the last digits only."""
    side = Side(nudged(case.model(), seed))
    for step, (drawn, failed) in zip(case.steps, past, strict=False):
        draws = _draws(step, drawn, side)
        outcome = _run(step, side, draws)
        side.chat = None if failed else side.chat
    moved = difference(outcome.result, expected.result) or difference(outcome.seen, expected.seen)
    return moved is not None or (draws is not None and not draws.impossible and impossible)
