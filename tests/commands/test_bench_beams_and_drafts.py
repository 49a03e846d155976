"""`compiled-llm bench beams-and-drafts` runs every task with both contenders, over the paths that it is about."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from compiled_llm.commands.bench import models
from compiled_llm.commands.bench.beams_and_drafts import Sizes, Tasks
from compiled_llm.commands.bench.report import Report
from compiled_llm.commands.bench.results import Task
from compiled_llm.commands.bench.tables import tables_of
from compiled_llm.huggingface.wrap import wrap
from support.bench import invoke, new_report

SMALL = ["--prompt", "6", "--new", "4", "--turns", "2", "--rows", "2", "--runs", "2"]


def test_every_task_is_measured_for_both(tmp_path: Path) -> None:
    file = tmp_path / "tasks.json"
    options = ["--model", "tiny", "--device", "cpu", "--mode", "eager", "--json", str(file)]
    done = invoke("beams-and-drafts", *options, *SMALL)
    assert done.exit_code == 0, done.output
    report = Report.load(file)
    theirs, ours = report.beams_and_drafts[:5], report.beams_and_drafts[5:]
    assert {each.contender for each in theirs} == {"hf-eager"}
    assert {each.contender for each in ours} == {"compiled-llm:eager"}
    assert [each.task for each in theirs] == [each.task for each in ours]
    for each in theirs, ours:
        assert [task.tokens for task in each] == [4, 4, 4, 8, 12]
    assert all(len(task.seconds) == 2 and min(task.seconds) > 0 for task in report.beams_and_drafts)
    assert "chat of 2 turns" in done.stdout


def test_each_task_takes_the_path_that_is_measured() -> None:
    model, draft = (
        wrap(
            models.build("tiny", torch.device("cpu"), torch.float32),
            mode="eager",
            kv_memory="500 tokens",
            progress=False,
        )
        for _ in range(2)
    )
    sizes = Sizes(prompt=6, new=5, turns=3, rows=2)
    for run in Tasks(model, draft, sizes).all().values():
        run()
    stats = model.compiled.stats()
    assert stats.generate_calls == {"compiled forward": 3, "fast loop": 3}
    assert stats.forward_calls == {"compiled": 1}
    assert stats.pages is not None
    assert stats.pages.used == 0


def test_the_table_holds_ours_against_huggingfaces() -> None:
    results = [Task("hf-eager", "beams", 10, [1.0, 2.0, 4.0]), Task("hf-eager", "chat", 10, [1.0])]
    results += [Task("compiled-llm:eager", "beams", 10, [0.5, 1.0, 1.0])]
    (table,) = tables_of(new_report(beams_and_drafts=results))
    assert table.columns == ["task", "hf-eager", "compiled-llm:eager", "x hf-eager"]
    assert table.rows == [["beams", "10.0 / 5.00", "20.0 / 10.0", "2.00"], ["chat", "10.0 / 10.0", "", ""]]


def test_a_failure_is_named_and_the_other_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no luck")

    monkeypatch.setattr("compiled_llm.commands.bench.contenders.ours.compiled_llm.wrap", fail)
    done = invoke("beams-and-drafts", "--model", "tiny", "--device", "cpu", "--mode", "eager", *SMALL)
    assert done.exit_code == 1
    assert "Failed: compiled-llm:eager: RuntimeError: no luck" in done.stdout
    assert "scoring, 2 rows" in done.stdout


def test_results_without_a_plot_say_so(tmp_path: Path) -> None:
    new_report(beams_and_drafts=[Task("hf-eager", "beams", 10, [1.0])]).save(tmp_path / "tasks.json")
    done = invoke("show", str(tmp_path / "tasks.json"), "--plot", str(tmp_path / "plot.png"))
    assert (done.exit_code, "there is no plot of these results" in done.output) == (2, True)
