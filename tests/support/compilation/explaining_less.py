"""`explain` at less cost, where what it traces is not the point."""

from __future__ import annotations

import pytest

from compiled_llm.explaining.tracing import Sandbox


def trace_steps_of_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those of many rows, too, a third of it: tests/explaining has all."""
    run = Sandbox._run
    monkeypatch.setattr(Sandbox, "_run", lambda sandbox, programs, batches: run(sandbox, programs, batches[:1]))
