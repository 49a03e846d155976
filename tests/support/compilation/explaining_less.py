"""`explain` at a third of its cost, where neither what it finds in steps nor its figures are the point."""

from __future__ import annotations

import pytest

from compiled_llm.explaining import timings, tracing


def explain_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have it trace prefill alone, and time few steps beside no bandwidth: tests/explaining has all of it."""
    run = tracing.Sandbox._run
    monkeypatch.setattr(tracing, "_STEPS", 1)
    monkeypatch.setattr(
        *(tracing.Sandbox, "_run"), lambda sandbox, programs, batches: run(sandbox, programs, batches[:1])
    )
    monkeypatch.setattr(timings, "read_bandwidth", lambda device, dtype: 1e9)
    for name in ("_WARM", "_RUNS", "_RUN", "_PROFILED"):
        monkeypatch.setattr(timings, name, 1)
