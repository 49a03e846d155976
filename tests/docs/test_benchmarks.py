"""Figures have runs: tables of BENCHMARKS.md agree with the JSON that they name, and the site shows all runs."""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import pytest

from compiled_llm.commands.bench import chart
from support.docs.pages import CHECKOUT, DOCS, figures

PAGE = CHECKOUT / "BENCHMARKS.md"
RESULTS = sorted((CHECKOUT / "results").glob("*.json"))
ROWS = (
    *("latency", "startup", "roofline", "beams_and_drafts", "offline", "online", "serve", "one_stream"),
    *("many_streams", "graph_times", "graph_use", "logits", "prefill_attention", "choices", "attention"),
    *("experts", "recurrent", "latent_decode", "loops", "grpo", "around", "variants", "sparse", "graph_modes"),
)
UNITS = (1.0, 1e2, 1e3, 1e-6, 1e-9, 1e-12, 2**-20)
"""What a table multiplies a figure by: as it is, percent, ms, MB, GB, trillions, MiB."""


class Section(NamedTuple):
    """What stands between two headings: rows of tables with their lines, and the runs that are linked."""

    rows: list[tuple[int, list[str]]]
    runs: list[dict[str, Any]]


def sections() -> Iterator[Section]:
    line = 0
    for text in re.split(r"^(?=#)", PAGE.read_text(), flags=re.MULTILINE):
        rows = [
            (number, [cell.strip() for cell in row.strip("|").split("|")])
            for number, row in enumerate(text.splitlines(), line + 1)
            if row.startswith("|") and "---" not in row
        ]
        names = re.findall(r"\(results/(\S+\.json)\)", text)
        line += text.count("\n")
        if rows and names:
            yield Section(rows, [json.loads((CHECKOUT / "results" / name).read_text()) for name in names])


def numbers_in(cell: str) -> list[float]:
    return [float(found.replace(",", "")) for found in re.findall(r"\d[\d,]*(?:\.\d+)?(?:e-\d+)?", cell)]


def figures_in(found: Any) -> Iterator[float]:
    """Every number of a result, however deep."""
    inner = found.values() if isinstance(found, dict) else found if isinstance(found, list) else ()
    for value in inner:
        yield from figures_in(value)
    if isinstance(found, (int, float)) and not isinstance(found, bool):
        yield found


def of_row(cells: list[str], run: dict[str, Any]) -> list[Any]:
    """What of a run a row is about: its contender's part at its batch, as far as it names them, or else all."""
    entries = [entry for kind in ROWS for entry in run.get(kind, []) if entry.get("contender") == cells[0]]
    at_batch = [entry for entry in entries if str(entry.get("batch")) == cells[1]]
    rates = [numbers_in(entry.get("load", "")) for entry in entries]  # "16 requests/s"
    memory = run.get("memory_mib", {}).get(cells[0])
    return [*(at_batch or entries), rates, memory] if entries else [run]


def is_known(number: float, known: list[float]) -> bool:
    return any(math.isclose(number, figure * unit, rel_tol=1e-9) for figure in known for unit in UNITS)


def test_every_figure_of_a_table_is_one_of_its_run() -> None:
    compared = 0
    for rows, runs in sections():
        for line, cells in rows:
            known = list(figures_in([part for run in runs for part in of_row(cells, run)]))
            for cell in cells[1:]:
                if re.match(r"[\d-]", cell) and cell != "100%":
                    wrong = [number for number in numbers_in(cell) if not is_known(number, known)]
                    assert not wrong, f"BENCHMARKS.md, line {line}: {wrong} of {cells} is in none of its runs"
                    compared += len(numbers_in(cell))
    assert compared > 100


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_result_says_how_it_was_made(path: Path) -> None:
    result = json.loads(path.read_text())
    assert any(result.get(kind) for kind in ROWS)
    assert result.get("command") or result["remark"]
    machine = result["machine"]
    assert path.name.startswith(machine["commit"][:7])
    assert machine["gpu"] or machine["cpu"]
    assert "versions" in machine or "logits" in result


# ---- the pages of the site

COMMENTS = "\n".join(page.read_text() for page in sorted((DOCS / "benchmarks").glob("*.md")))


def test_every_run_is_on_one_page() -> None:
    assert sorted(re.findall(r"^<!-- run: (\S+) -->$", COMMENTS, re.MULTILINE)) == [path.name for path in RESULTS]


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_page_shows_a_run_whole_and_nothing_else(path: Path) -> None:
    run = json.loads(path.read_text())
    shown = figures().on_page_markdown(f"# Title\n\n<!-- run: {path.name} -->\n")
    assert f"(../results/{path.name})" in shown
    rows = [line for line in shown.splitlines() if line.startswith("|")]
    assert len(rows) >= sum(len(run.get(kind, [])) for kind in ROWS)
    known = list(map(abs, figures_in(run)))
    for cell in (cell.strip() for row in rows for cell in row.split("|")):
        if re.match(r"[\d-]+[\d. ,/]*%?$", cell) and cell not in ("100%", "---"):
            assert all(is_known(number, known) for number in numbers_in(cell)), f"{cell} is not in the run"


def test_a_run_with_figures_that_no_table_shows_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = {"commit": "0123456", "gpu": {"name": "a GPU"}}
    (tmp_path / "run.json").write_text(json.dumps({"machine": machine, "news": [{"figure": 1}]}))
    monkeypatch.setattr(figures(), "RESULTS", tmp_path)
    with pytest.raises(ValueError, match="news"):
        figures().shown("run.json")


def test_a_run_whose_script_is_gone_names_a_commit_that_has_it() -> None:
    shown = figures().shown("d84d17f-sparse.json")
    assert "python tools/bench/sparse.py" in shown
    assert "script at commit d868dfb9" in shown
    assert "script at" not in figures().shown("439edf7-latency-qwen3-0.6b.json")


# ---- the chart


@pytest.fixture
def readme_chart(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(CHECKOUT / "tools" / "bench"))
    return importlib.import_module("readme_chart")


@pytest.mark.parametrize("page", ["README.md", "BENCHMARKS.md"])
def test_a_page_says_what_its_chart_shows(page: str, readme_chart: Any) -> None:
    alternative = re.search(r"^!\[(.+)\]\(docs/speed\.svg\)$", (CHECKOUT / page).read_text(), re.MULTILINE)
    assert alternative is not None
    for panel, rates in readme_chart.speeds().rates.items():
        shown = ", ".join(f"{chart.NAMES[name]} {rates[name]:,.0f}" for name in chart.NAMES if name in rates)
        assert f" {panel}: {shown}." in alternative[1]


def test_the_chart_is_drawn_from_its_runs(tmp_path: Path, readme_chart: Any) -> None:
    """The script gives the same bytes, as long as matplotlib is the same."""
    drawn = (CHECKOUT / "docs" / "speed.svg").read_text()
    if f"Matplotlib v{matplotlib.__version__}," not in drawn:
        pytest.skip("drawn by another matplotlib")
    readme_chart.draw(tmp_path / "speed.svg")
    assert (tmp_path / "speed.svg").read_text() == drawn


def test_each_colour_but_those_that_suit_both_has_one_for_dark_pages(readme_chart: Any) -> None:
    drawn = (CHECKOUT / "docs" / "speed.svg").read_text()
    assert {*re.findall(r'style="(?:fill|stroke): (#\w{6})', drawn)} <= {*readme_chart.DARK, "#8c8c8c", "#e6550d"}
    assert all(f'"fill: {light}"] {{fill: {dark} !important}}' in drawn for light, dark in readme_chart.DARK.items())
