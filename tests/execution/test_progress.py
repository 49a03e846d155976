"""Progress of preparations on stderr; what is printed in a notebook stands there once, as text."""

from __future__ import annotations

import re
import time

import pytest
from rich import console, jupyter

import compiled_llm
from compiled_llm import WrapConfig
from compiled_llm.execution.reporting import progress
from compiled_llm.execution.reporting.progress import ProgressDisplay, watched
from support.tiny_models import tiny_qwen3


def lines_of(capsys: pytest.CaptureFixture[str], least: int) -> list[str]:
    """Return what stands on stderr once it has so many lines."""
    written = ""
    while len(lines := written.splitlines()) < least:
        time.sleep(0.05)
        written += capsys.readouterr().err
    return lines


@pytest.mark.parametrize("brief", [False, True])
def test_in_a_pipe_a_task_says_what_it_does_and_that_it_still_does(brief: bool, monkeypatch, capsys) -> None:
    monkeypatch.setattr(progress, "REMIND_AFTER", 0.2)
    with ProgressDisplay(enabled=True, brief=brief).task("tracing") as update:
        update("compiling")
        update("compiling")
        lines = lines_of(capsys, least=1 if brief else 3)
    lines += capsys.readouterr().err.splitlines()
    said = [] if brief else ["compiled_llm: tracing", "compiled_llm: compiling"]
    assert lines[: len(said)] == said
    reminders = lines[len(said) :]
    assert reminders
    assert all(re.fullmatch(r"compiled_llm: still compiling, \d+ s", line) for line in reminders)
    time.sleep(0.3)
    assert capsys.readouterr().err == ""


def test_the_stage_of_a_task_follows_its_description(monkeypatch, capsys) -> None:
    monkeypatch.setattr(progress, "REMIND_AFTER", 0.1)
    far = iter(["", *(f"building kernel {number} of 9" for number in range(1, 10))])
    with ProgressDisplay(enabled=True).task("compiling", lambda: next(far, "")):
        lines = lines_of(capsys, least=3)
    assert lines[:3] == ["compiled_llm: compiling", "compiled_llm: still compiling, 0 s", lines[2]]
    assert lines[2].startswith("compiled_llm: still compiling: building kernel 1 of 9, 0 s")


def test_a_terminal_shows_how_far_a_task_is(monkeypatch, capsys) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with ProgressDisplay(enabled=True).task("compiling", lambda: "building kernel 3 of 9"):
        time.sleep(0.3)
    assert "compiled_llm: compiling: building kernel 3 of 9" in re.sub(
        "\x1b\\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().err
    )


@pytest.mark.whole
def test_a_terminal_of_80_columns_shows_one_line(monkeypatch, capsys) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    display, stages = ProgressDisplay(enabled=True), iter(["kernel 3 of 16", "decomposing operators", ""] * 9)
    for task in ("decode, 64 rows, once", "decode, 64 rows (10 of 12), once, and what else is long"):
        with display.task(f"compiling {task}", lambda: next(stages)):
            time.sleep(1.1)
    with display.download("the demo model", 92_871_040) as arrived:
        for size in (1 << 20, 92_000_000):
            arrived(size)
            time.sleep(0.15)
    written = capsys.readouterr().err
    assert not re.search(r"(\x1b\[2K.?\x1b\[1A){2}", written)  # up, out of a second line
    lines = re.split("[\r\n]+", re.sub("\x1b\\[[0-9;?]*[a-zA-Z]", "", written))
    assert max(map(len, lines)) <= 80
    shown = [re.sub(r"^\W+|\W*\d:\d\d:\d\d$", "", line) for line in lines]
    assert "compiled_llm: compiling decode, 64 rows, once: decomposing operators" in shown
    assert "compiled_llm: compiling decode, 64 rows (10 o…: decomposing operators" in shown
    assert any(re.search(r"downloading the demo model .* 92\.0/92\.9 MB +[\d.]+ MB/s", line) for line in lines)


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("mode", ["eager", "compile"])
def test_warmup_numbers_what_it_will_do(mode: str, capsys, monkeypatch, without_inductor) -> None:
    model = compiled_llm.wrap(tiny_qwen3(num_hidden_layers=1), mode=mode, max_batch_size=8, kv_memory="400 tokens")
    capsys.readouterr()
    for sizes in ([2], [3, 1, 2]):
        model.compiled.warmup(sizes)
    monkeypatch.setattr(WrapConfig, "captures_on", lambda self, device: mode != "eager")
    model.compiled.warmup()
    expected = [
        "compiled_llm: tracing prefill (1 of 2)",
        "compiled_llm: tracing decode, 2 rows (2 of 2)",
        "compiled_llm: tracing decode, 1 row (1 of 2)",
        "compiled_llm: preparing decode, 4 rows (2 of 2)",
        "compiled_llm: capturing decode, 8 rows",
    ]
    assert capsys.readouterr().err.splitlines() == ([] if mode == "eager" else expected)


@pytest.mark.whole
def test_who_watches_hears_the_words_of_stderr_though_they_are_not_shown(capsys, without_inductor) -> None:
    model = compiled_llm.wrap(tiny_qwen3(num_hidden_layers=1), mode="compile", kv_memory="400 tokens", progress=False)
    heard: list[tuple[str, int | None, int | None]] = []
    with watched(lambda doing, step=None, steps=None: heard.append((doing, step, steps))):
        model.compiled.warmup([2])
        model.compiled.warmup([4])
    model.compiled.warmup([8])
    assert heard == [
        ("tracing prefill (1 of 2)", 1, 2),
        ("tracing decode, 2 rows (2 of 2)", 2, 2),
        ("preparing decode, 4 rows", None, None),
    ]
    assert capsys.readouterr().err == ""


# ---- in a notebook, where rich would show what it draws below the cell, too


@pytest.fixture
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
