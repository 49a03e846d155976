"""Which step runs for the one that is wanted, and how, as the table of steps is now. Decides, and changes nothing."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from compiled_llm.compilation.graphs.step_key import StepKey
from compiled_llm.compilation.graphs.step_table import StepTable

How = Literal["run", "launch", "capture", "compile"]
"""How a step runs."""
# run: as it is; it is ready, or where nothing is captured, compiled.
# launch: kernel by kernel; its CUDA graph is captured while later steps run.
# capture: and is captured at once, since others have to make room for its CUDA graph.
# compile: once it is compiled, unless it turns out that nothing has to be compiled for it.


class Dispatch(NamedTuple):
    """The step to run for the wanted one, and how."""

    step: StepKey  # the one that is wanted, or a larger one, to which it is padded
    how: How  # of ``step``


class Dispatcher:
    """The choice of steps of one model; if it ``captures`` while others run, calls wait for no more than compiling."""

    def __init__(self, table: StepTable, simplest: int = 0, padding: int = 0) -> None:
        """``simplest`` is the schedule of prefills that can run any batch; ``padding`` bounds tokens that pad one."""
        self._table = table
        self._simplest, self._padding = simplest, padding

    @property
    def captures(self) -> bool:
        return self._table.runnable_state == "ready"

    def dispatch(self, step: StepKey, exact: bool) -> Dispatch:
        """Return what runs for a step, in no larger shape if ``exact``; ``Steps.may_replay`` tells more."""
        table = self._table
        entry = table.entries.get(step)
        state = "missing" if entry is None else entry.state
        if state == table.runnable_state:
            return Dispatch(step, "run")
        known = entry is not None and entry.checked_at == table.model_checks
        if step.phase == "decode" and not known:  # prefills run in programs that are compiled before
            return Dispatch(step, "compile")
        if exact:
            return Dispatch(step, "launch" if state == "failed" or not table.full else "capture")
        larger = self._next_larger(step)
        return Dispatch(step, "launch") if larger is None else Dispatch(larger, "run")

    def _next_larger(self, step: StepKey) -> StepKey | None:
        """Return the smallest ready step that holds all steps of another, and does not take far longer."""
        padding = self._padding if step.is_prefill else math.inf
        larger = [
            other
            for other in self._table.of(step.phase)
            if other.schedule in (step.schedule, self._simplest)
            and other.shares <= step.shares
            and other.purpose == step.purpose
            and step.tokens <= other.tokens <= step.tokens + padding
            and step.rows <= other.rows
            and (step.is_prefill or step.new_tokens_per_row == other.new_tokens_per_row)
        ]
        return min(larger, key=lambda other: (other.tokens, other.rows, other.variant != step.variant), default=None)
