"""`explain` at a third of its cost, where neither what it finds in steps nor its figures are the point."""

from __future__ import annotations

from typing import Any

import pytest

from compiled_llm.explaining import tracing
from compiled_llm.explaining.profile import timings
from compiled_llm.explaining.tracing import Sandbox


def explain_less(patch: pytest.MonkeyPatch) -> None:
    """Have it trace prefill alone, and time few steps: tests/explaining has all of it."""
    run_one_batch(patch)
    patch.setattr(tracing, "_STEPS", 1)
    for name in ("_WARM", "_RUNS", "_RUN", "_PROFILED"):
        patch.setattr(timings, name, 1)


def run_one_batch(patch: pytest.MonkeyPatch) -> None:
    """Have it run the programs of one row alone."""
    run = Sandbox._run

    def run_one(sandbox: Sandbox, programs: Any, batches: Any) -> Any:
        return run(sandbox, programs, batches[:1])

    patch.setattr(Sandbox, "_run", run_one)
