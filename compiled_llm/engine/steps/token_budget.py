"""Asks the policy of chunks how many tokens of prompts run in a step, and tells it how long steps have taken."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import NamedTuple

from compiled_llm.engine.chunks.state import ChunkPolicy, ChunkState
from compiled_llm.engine.chunks.step_times import StepTimes, place_of
from compiled_llm.engine.chunks.whole import Whole
from compiled_llm.engine.chunks.within import SMALLEST, Within
from compiled_llm.engine.steps.plan import StepPlan
from compiled_llm.engine.steps.request import Request
from compiled_llm.engine.steps.scheduler import Scheduler

logger = logging.getLogger("compiled_llm.engine")

_EVERY = 16
"""Of steps without prompts, one of so many is timed."""
_STEPS_TOO_LONG = 3
"""So many steps of the smallest chunks, one after the other, are no accident."""


class _SmallStep(NamedTuple):
    """A step with so few tokens of prompts that it cannot be made shorter."""

    seconds: float
    decoding: int
    tokens: int
    mixed: bool


class TokenBudget:
    """An engine's policy of chunks, with what it is told.

    Attributes:
        times: how long steps took, as far as the policy asks for it.
        timing: whether steps are timed now: a policy wants to know, and somebody follows answers.
    """

    def __init__(self, chunks: ChunkPolicy, max_tokens: int, mixed: bool = False, packs_rows: bool = False) -> None:
        """Ask a policy; chunks have up to ``max_tokens``."""
        # If all steps with prompts are ``mixed``, chunks leave room for the token of each running row; if some may be,
        # as ``packs_rows`` says, chunks fill what a launch is padded to together with the running rows.
        self._chunks, self._max_tokens, self._mixed, self._packs_rows = chunks, max_tokens, mixed, packs_rows or mixed
        self._limit = chunks.seconds if isinstance(chunks, Within) else math.inf
        self.times = StepTimes()
        self.timing = self._always = isinstance(chunks, Within)
        self._never = isinstance(chunks, Whole)
        self._untimed = 0  # steps since the last one that could be timed
        self._too_long: list[_SmallStep] = []  # the latest steps of the smallest chunks, if all were
        self._told = False

    def tokens(self, scheduler: Scheduler, decode: Sequence[Request]) -> int:
        """Return how many tokens of prompts may run next to these rows; at least a few, so that prompts go on."""
        most = self._max_tokens
        if self._mixed:
            few = max(1, min(SMALLEST, most // 2))  # all of them would leave even one row no room
            most = max(few, most - len(decode))
        if self._never:
            return most
        state = _BudgetState(scheduler, decode)
        state.rows, state.most, state.times = len(decode), most, self.times
        state.padding = state.rows if self._packs_rows else 0
        state.step, state.begun = scheduler.step, scheduler.begun
        return max(1, min(most, self._chunks.plan(state)))

    def wants_time_of(self, plan: StepPlan) -> bool:
        """Return whether to time the next step: each with prompts, and a sample of those without."""
        if self._never:
            return False
        self._untimed += 1
        new = self.timing and not self.times.knows(len(plan.decode))
        if not (plan.extend or self._untimed >= _EVERY or new):
            return False
        self._untimed = 0
        self.timing = self._always or _followed(plan.requests)
        return self.timing

    def expected(self, plan: StepPlan) -> float:
        """Return the seconds that a step is likely to take; 0.0 if that is unknown."""
        rows, tokens = len(plan.decode), sum(len(chunk.ids) for chunk in plan.extend)
        without, longer = self.times.decode(rows) if rows else 0.0, self.times.longer(rows)
        if without is None or (tokens and longer is None):
            return 0.0
        return without + (longer[place_of(tokens + rows * self._packs_rows)] if tokens and longer else 0.0)

    def ran(self, decoding: int, tokens: int, seconds: float, mixed: bool = False) -> None:
        """Learn from a step of ``decoding`` rows and ``tokens`` of prompts, which took the device ``seconds``."""
        if 0 < tokens <= SMALLEST and not self._told:
            self._compare_with_limit(_SmallStep(seconds, decoding, tokens, mixed))
        self.times.learn(decoding, tokens + decoding if mixed else tokens, seconds)

    def _compare_with_limit(self, step: _SmallStep) -> None:
        """Tell the user once if steps cannot be as short as they should be, and how long they have to be."""
        if step.seconds <= self._limit:
            self._too_long.clear()
            return
        self._too_long.append(step)
        if len(self._too_long) < _STEPS_TOO_LONG:
            return
        self._told, usual = True, sorted(self._too_long)[_STEPS_TOO_LONG // 2]
        taken, least = round(1000 * usual.seconds, 2), (1 + math.floor(10_000 * usual.seconds)) / 10
        logger.warning(
            "compiled_llm: max_step_ms=%g: one %s (running requests: %d, tokens of prompts: %d) takes %g ms, and no "
            "chunk is smaller; give at least max_step_ms=%g",
            *(1000 * self._limit, "mixed step" if usual.mixed else "step", usual.decoding, usual.tokens, taken, least),
        )


class _BudgetState(ChunkState):
    def __init__(self, scheduler: Scheduler, decode: Sequence[Request]) -> None:
        self._scheduler, self._decode = scheduler, decode

    @property
    def followed(self) -> bool:
        return _followed(self._decode)

    @property
    def left(self) -> int:
        return self._scheduler.tokens_left


def _followed(requests: Sequence[Request]) -> bool:
    return any(request.listeners is not None and request.listeners.used for request in requests)
