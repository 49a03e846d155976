"""`compiled-llm bench chart` draws what a file of results says: the bench's own JSON, or a published run."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib as mpl
import pytest
from matplotlib.figure import Figure

from compiled_llm.commands.bench import chart
from compiled_llm.commands.bench.chart import Speeds
from support.bench import PNG, full_report, invoke, new_report, one_latency

PUBLISHED = {
    "published": True,
    "model": {"name": "m", "weights": "random", "dtype": "bfloat16"},
    "machine": {"date": "2026-11-21 11:23:17", "commit": "d414b6dcafe", "gpu": {"name": "NVIDIA H200"}},
    "latency": [
        {"contender": name, "batch": batch, "prompt": 128, "new": 256, "sampled": sampled, "figures": figures}
        for batch in (1, 8)
        for name, rate in (("vllm", 2.0), ("other", 3.0), ("compiled-llm:cuda-graphs", 5.0), ("hf-eager", 1.0))
        for sampled in (False, True)
        for figures in [{"end_to_end_tokens_per_s": {"median": rate * batch / (2 if sampled else 1)}}]
    ],
}


@pytest.fixture
def published(tmp_path: Path) -> Path:
    path = tmp_path / "published.json"
    path.write_text(json.dumps(PUBLISHED))
    return path


def test_published_runs_are_read_without_the_times_of_each_run(published: Path) -> None:
    speeds = chart.read(published)
    assert speeds.title == "m (random weights, bfloat16) on NVIDIA H200: tokens per second, end to end"
    assert "prompts of 128 tokens, 256 new tokens, greedy; 2026-11-21, commit d414b6d;" in speeds.asked
    assert speeds.rates[8] == {"hf-eager": 8.0, "vllm": 16.0, "other": 24.0, "compiled-llm:cuda-graphs": 40.0}
    assert speeds.contenders == ["hf-eager", "vllm", "compiled-llm:cuda-graphs", "other"]


def test_the_benchs_own_json_is_read(tmp_path: Path) -> None:
    results = [one_latency("a"), one_latency("a", batch=4), one_latency("b", sampled=True), one_latency("a", new=9)]
    path = tmp_path / "latency.json"
    new_report(latency=results).save(path)
    rates = chart.read(path).rates
    assert rates == {2: {"a": results[0].end_to_end.median}, 4: {"a": results[1].end_to_end.median}}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model": {}, "machine": {}, "latency": []}'])
def test_a_file_without_results_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "nothing.json"
    path.write_text(text)
    done = invoke("chart", str(path), str(tmp_path / "chart.svg"))
    assert done.exit_code == 2
    assert f"error: {path} has no greedy result of compiled-llm bench latency" in done.output


@pytest.mark.parametrize("name", ["chart", "chart.jpeg", "chart.svg.txt"])
def test_another_kind_of_picture_is_refused(name: str, published: Path, tmp_path: Path) -> None:
    done = invoke("chart", str(published), str(tmp_path / name))
    assert done.exit_code == 2
    assert f"error: {tmp_path / name}: the name of a picture ends with .svg, .png, .pdf" in done.output


def test_bars_are_as_long_as_the_rates_and_say_them(published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    speeds = chart.read(published)
    chart.draw(speeds, Path("unused.svg"))
    (figure,) = drawn
    assert [panel.get_title(loc="left") for panel in figure.axes] == ["batch 1", "batch 8"]
    for panel, rates in zip(figure.axes, speeds.rates.values(), strict=True):
        wanted = [rates[name] for name in speeds.contenders]
        assert [bar.get_width() for bar in panel.patches] == wanted
        assert [text.get_text() for text in panel.texts] == [f" {rate:,.0f}" for rate in wanted]
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["HuggingFace", "vLLM", "compiled_llm", "other"]


def test_a_contender_that_was_not_measured_at_a_batch_size_has_no_bar_there(tmp_path: Path) -> None:
    speeds = Speeds("title", "asked", {1: {"hf-eager": 1.0}, 8: {"vllm": 2.0}})
    chart.draw(speeds, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(PNG)


def test_the_same_results_give_the_same_picture(published: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "new" / "first.svg", tmp_path / "second.svg"
    before = mpl.rcParams["svg.hashsalt"]
    for picture in (first, second):
        assert invoke("chart", str(published), str(picture)).exit_code == 0
    assert first.read_bytes() == second.read_bytes()
    assert mpl.rcParams["svg.hashsalt"] == before


def test_a_report_of_every_kind_has_a_chart(tmp_path: Path) -> None:
    full_report().save(tmp_path / "full.json")
    assert invoke("chart", str(tmp_path / "full.json"), str(tmp_path / "chart.png")).exit_code == 0


def test_a_matplotlibrc_of_the_current_folder_decides_nothing(published: Path, tmp_path: Path) -> None:
    pictures = [tmp_path / "plain.svg", tmp_path / "beside.svg"]
    chart.draw(chart.read(published), pictures[0])
    with mpl.rc_context({"text.usetex": True, "axes.facecolor": "red"}):
        chart.draw(chart.read(published), pictures[1])
        assert mpl.rcParams["text.usetex"] is True, "the user's settings stay"
    assert pictures[0].read_text() == pictures[1].read_text()
