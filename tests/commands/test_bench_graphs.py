"""`compiled-llm bench graphs`: what requests wait for whose CUDA graphs are there, are missing, or had to go."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from compiled_llm.commands.bench import plot
from compiled_llm.commands.bench.graph_results import GraphTimes, GraphUse
from compiled_llm.commands.bench.report import Report
from compiled_llm.commands.bench.serving import graphs
from compiled_llm.commands.bench.serving.contender import Served
from compiled_llm.commands.bench.serving.graphs import EVICTED, ON_DEMAND, PREPARED, Asking, GraphLoad
from compiled_llm.commands.bench.serving.mode_engine import ModeEngine, ModeSession
from compiled_llm.commands.bench.serving.workloads import Asked
from compiled_llm.commands.bench.tables import tables_of
from compiled_llm.commands.bench.timing import Percentiles
from support.bench import CPU, PNG, invoke, new_report, new_setup
from support.stand_in_cuda_graphs import let_a_cpu_capture
from support.stand_in_piecewise import let_a_cpu_capture_pieces

LENGTHS = [10, 20, 40, 70, 90]
"""Prompts of five graphs."""


def test_a_cpu_measures_its_modes_and_says_what_it_leaves_out(tmp_path: Path) -> None:
    path, picture = tmp_path / "results.json", tmp_path / "picture.png"
    done = invoke(
        "graphs", "--model", "tiny", "--device", "cpu", "--prompts", "6,20", "--new", "8", "--requests", "2",
        "--contenders", "compiled-llm:eager,compiled-llm:cuda-graphs,vllm", "--json", str(path), "--plot", str(picture),
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    report = Report.load(path)
    assert [(result.contender, result.cuda_graphs, result.prompt) for result in report.graph_times] == [
        ("compiled-llm:eager", PREPARED, 6),
        ("compiled-llm:eager", PREPARED, 20),
    ]
    assert [len(result.first_s) for result in report.graph_times] == [2, 2]
    assert all(0 < result.between_s.p50 <= result.between_s.p99 for result in report.graph_times)
    assert report.graph_use == []
    assert set(report.unavailable) == {"compiled-llm:cuda-graphs", "vllm"}
    assert "Not available: compiled-llm:cuda-graphs: a CPU has no CUDA graphs" in done.stdout
    assert picture.read_bytes().startswith(PNG)


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize(
    ("mode", "let_it_record"), [("cuda-graphs", let_a_cpu_capture), ("piecewise", let_a_cpu_capture_pieces)]
)
def test_graphs_are_measured_in_each_state(
    mode: str, let_it_record: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    let_it_record(monkeypatch)
    monkeypatch.setattr(ModeEngine, "obstacle", lambda self, setup: None)
    monkeypatch.setattr(ModeEngine, "captures", lambda self, setup: True)
    load, report = GraphLoad(LENGTHS, new=8, requests=2, seconds=60.0, few=4), new_report()
    graphs.measure(graphs.choose(f"compiled-llm:{mode}"), new_setup(load.bounds), load, report, lambda: None)
    assert report.failures == []
    assert [(result.cuda_graphs, result.prompt, len(result.first_s)) for result in report.graph_times] == [
        *((ON_DEMAND, length, 1) for length in LENGTHS),
        *((state, length, 2) for state in (PREPARED, EVICTED) for length in LENGTHS),
    ]
    assert all(bool(result.running_s) == (result.cuda_graphs != ON_DEMAND) for result in report.graph_times)
    use = {result.cuda_graphs: result for result in report.graph_use}
    # One decode step; a prefill for each length, and one for the prompt with which everything is compiled; and a few
    # in which any other could run.
    assert use[ON_DEMAND].ready > 1 + len(LENGTHS) + 1
    assert use[ON_DEMAND].evictions == 0
    assert use[PREPARED].ready == use[PREPARED].captures > use[ON_DEMAND].ready
    assert use[EVICTED].ready == load.few
    # Each of the rounds, that which is not timed too, misses each length; some of them miss others besides.
    assert use[EVICTED].evictions >= 5 * len(LENGTHS)
    assert use[EVICTED].seconds_a_capture == 0.5


class Scripted(ModeSession):
    """Answers with a token each 0.25 s after a first one at 1 s; a second request holds the first one up for 1 s."""

    def __init__(self) -> None:
        self.versions = {}
        self.vocabulary = 512
        self.asked: list[Asked] = []
        self.beside: list[tuple[Asked, Asked, int]] = []

    def run(self, asked: Sequence[Asked], temperature: float) -> Served:
        self.asked += asked
        times = [[request.arrival + 1 + 0.25 * token for token in range(request.new)] for request in asked]
        return Served(times[0][-1], {}, times)

    def run_beside(self, running: Asked, other: Asked, tokens: int) -> list[float]:
        self.beside.append((running, other, tokens))
        return [1.0, 6.0, *(7 + 0.25 * token + (token > tokens) for token in range(running.new - 2))]

    def graph_use(self, name: str, cuda_graphs: str) -> GraphUse | None:
        return None


def test_waits_are_those_of_the_request_alone_and_of_one_that_runs_meanwhile() -> None:
    load, report, session = GraphLoad([30, 10], new=16, requests=3, seconds=60.0, few=4), new_report(), Scripted()
    asking = Asking("fake", new_setup(load.bounds), load, report)
    asking.begin(session, PREPARED)
    asking.ask(load)
    first, second = report.graph_times
    assert [first.prompt, second.prompt] == [10, 30]
    assert (first.first_s, first.between_s) == ([1.0] * 3, Percentiles(0.25, 0.25, 0.25))
    assert second.running_s == pytest.approx([1.25] * 3)
    warm, alone = session.asked[:2], session.asked[2:]
    assert [request.new for request in warm] == [2, 2], "a few tokens, not timed, of each length"
    assert [(len(request.prompt), request.new) for request in alone] == [(10, 16), (30, 16)] * 3
    beside = [(len(running.prompt), running.new, len(other.prompt), other.new) for running, other, _ in session.beside]
    assert beside == [(10, 16, 10, 4), (10, 16, 30, 4)] * 3
    assert [tokens for *_, tokens in session.beside] == [4] * 6, "in the midst of the other's answer"
    together = [request for running, other, _ in session.beside for request in (running, other)]
    prompts = {tuple(request.prompt) for request in (*session.asked, *together)}
    assert len(prompts) == len(session.asked) + len(together), "each has tokens of its own"


def test_no_round_is_begun_after_so_many_seconds() -> None:
    assert list(GraphLoad([10], 8, requests=5, seconds=0.0, few=4).rounds()) == [0]
    assert list(GraphLoad([10], 8, requests=5, seconds=60.0, few=4).rounds()) == [0, 1, 2, 3, 4]


def test_neighbours_which_may_share_a_graph_do_not_follow_each_other() -> None:
    lengths = [10, 50, 100, 150, 200, 250, 300, 350, 400]
    turn = GraphLoad(lengths, 8, 1, 1.0, 4).in_turn()
    assert sorted(turn) == lengths
    assert all(abs(lengths.index(one) - lengths.index(other)) > 1 for one, other in itertools.pairwise(turn))


def test_tables_have_prompts_side_by_side_and_a_picture_has_every_state(tmp_path: Path) -> None:
    times = Percentiles(0.0005, 0.00075, 0.001)
    results = [
        GraphTimes(name, state, prompt, 64, [0.003, 0.004, 0.0035], times, running, 1.0)
        for name, state, running in (("ours", PREPARED, [0.004]), ("ours", EVICTED, []))
        for prompt in (100, 50)
    ]
    use = [GraphUse("ours", EVICTED, 4, 3 * 2**20, 50, 46, 5.0), GraphUse("trees", PREPARED, 1, 2**20, 1, 0, None)]
    report = new_report(graph_times=results[:-1], graph_use=use)
    first, between, running, graph_table = tables_of(report)
    assert first.columns == ["contender", "cuda_graphs", "50", "100"]
    assert first.rows == [["ours", PREPARED, *["3.50 / 4.00"] * 2], ["ours", EVICTED, "", "3.50 / 4.00"]]
    assert between.rows[0][2:] == ["0.50 / 0.75"] * 2
    assert running.rows == [["ours", PREPARED, *["4.00 / 4.00"] * 2]]
    assert graph_table.rows == [
        ["ours", EVICTED, "4", "3.00", "50", "46", "100.0"],
        ["trees", PREPARED, "1", "1.00", "1", "0", ""],
    ]
    report.save(tmp_path / "results.json")
    assert Report.load(tmp_path / "results.json") == report
    panel = plot.figure_of(report).axes[0]
    assert [line.get_label() for line in panel.get_lines()] == ["ours, prepared", "ours, evicted"]
    assert np.asarray(panel.get_lines()[0].get_xydata()).tolist() == [[50, 3.5], [100, 3.5]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--contenders", "compiled-llm:engine"], "no compiled-llm:engine; there are compiled-llm:eager"),
        (["--prompts", "ten"], "--prompts 'ten'"),
        (["--new", "7"], "--new"),
        (["--few", "1"], "--few"),
        (["--model", "tiny", "--prompts", "40000"], "40960 positions"),
    ],
)
def test_bad_arguments_give_one_clear_error(arguments: list[str], message: str) -> None:
    done = invoke("graphs", "--device", CPU.type, *arguments)
    assert done.exit_code != 0
    assert message in done.output
    assert "Traceback" not in done.output
