"""Counts events of a model runner with their causes; ``explaining.wording`` has a sentence for each cause."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from compiled_llm.compilation.graphs.step_key import StepKey
from compiled_llm.execution.reporting.stopwatch import Stopwatch

logger = logging.getLogger("compiled_llm.graphs")

UploadCause = Literal["new_page", "call_moved_in", "rows_changed", "page_copied", "bucket_prepared"]
"""Why rows and their page table were written into the decode buffers."""

ColdCause = Literal["warmup_not_called", "size_not_named", "prepared_and_lost", "never_prepared"]
"""Why a step had not been compiled or captured before a call needed it."""


@dataclass(frozen=True)
class ColdStart:
    """A step that was compiled or captured while a call waited for it."""

    what: str  # which program and bucket
    rows: int  # how many rows the call had
    seconds: float  # how long it waited
    cause: ColdCause
    warmed: bool  # whether ``warmup`` had been called before and could have prepared it


@dataclass
class Events:
    """Events of a wrapped model; they survive ``model.to()``."""

    # how often calls have used each step, and under their names the prefills of rows that have extra inputs
    used: Counter[StepKey | str] = field(default_factory=Counter)
    # page tables written into the decode buffers, by cause
    uploads: Counter[UploadCause] = field(default_factory=Counter)
    cold_starts: list[ColdStart] = field(default_factory=list)
    cascade_steps: int = 0  # decode steps that read pages which rows share once
    kv_saturated: int = 0  # numbers that were clamped on their way into pages, of model runners that are gone
    generating: Stopwatch = field(default_factory=Stopwatch)  # runs while our loops do, and nothing is compiled
    preparing: Stopwatch = field(default_factory=Stopwatch)  # runs while something is compiled or captured
    _warmed: bool = False

    _lost: bool = False

    def warmed_up(self) -> None:
        self._warmed, self._lost = True, False

    def started_again(self) -> None:
        """Note that all programs and CUDA graphs are gone."""
        self._lost = self._warmed

    def waited(self, what: str, rows: int, seconds: float, preparable: bool = True) -> None:
        """Note a ``ColdStart``; ``preparable`` is whether ``warmup`` can prepare that step."""
        cold = ColdStart(what, rows, seconds, self._cause(preparable), self._warmed and preparable)
        self.cold_starts.append(cold)
        logger.debug("a call of %d rows waited %.1f s for %s: %s", rows, seconds, what, cold.cause)

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Count the block's time as time for compiling and capturing, and not for generating."""
        with self.generating.paused(), self.preparing.running():
            yield

    def _cause(self, preparable: bool) -> ColdCause:
        if not preparable:
            return "never_prepared"
        if not self._warmed:
            return "warmup_not_called"
        return "prepared_and_lost" if self._lost else "size_not_named"
