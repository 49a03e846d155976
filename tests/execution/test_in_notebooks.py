"""What is printed in a notebook stands there once, as text; rich would show what it draws below the cell, too."""

from __future__ import annotations

import pytest
from rich import console, jupyter

import compiled_llm
from compiled_llm.execution.reporting.progress import ProgressDisplay
from support.tiny_models import tiny_qwen3


@pytest.fixture(autouse=True)
def shown(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What rich shows by itself."""
    shown: list[object] = []
    monkeypatch.setattr(console, "_is_jupyter", lambda: True)
    monkeypatch.setattr(jupyter, "display", lambda *what: shown.append(what))
    return shown


def test_stats_and_reports_are_text_and_nothing_else(shown: list[object]) -> None:
    model = compiled_llm.wrap(tiny_qwen3(), mode="eager")
    for printed in (model.compiled.stats(), model.compiled.explain()):
        assert "generate" in str(printed)
    assert shown == []


def test_progress_is_lines_of_stderr(shown: list[object], capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressDisplay(enabled=True).task("tracing"):
        pass
    assert capsys.readouterr().err == "compiled_llm: tracing\n"
    assert shown == []
