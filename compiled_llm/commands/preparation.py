"""The last line of `compiled-llm generate`: what it has compiled, in how long, and whether that is kept."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from compiled_llm.execution.reporting.stats import Stats


class Preparation:
    """The time that a block takes, and whether Inductor compiles anything in it."""

    def __init__(self) -> None:
        self._compiled_before = self._start = self._seconds = 0.0
        self._compiled = False

    def __enter__(self) -> Preparation:
        self._start = time.perf_counter()
        self._compiled_before = _compiled_so_far()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._seconds = time.perf_counter() - self._start
        self._compiled = _compiled_so_far() > self._compiled_before

    def figures(self, stats: Stats) -> str:
        if not stats.graphs:
            return "nothing compiled"
        graphs = f"{stats.graphs} graph{'s' if stats.graphs > 1 else ''}"
        if self._compiled:
            done = f"{graphs} compiled in {self._seconds:.0f} s, and kept for the next start"
        else:
            done = f"{graphs} traced in {self._seconds:.0f} s, and code taken from the cache"
        faults = {"recompiles": stats.recompiles, "cudagraph skips": stats.cudagraph_skips}
        return ", ".join([done, *(f"{count} {fault}" for fault, count in faults.items() if count)])


def _compiled_so_far() -> int:
    from compiled_llm.compat.torch.inductor import compiled_anew  # imports torch

    return compiled_anew()
