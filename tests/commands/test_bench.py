"""`compiled-llm bench`: each command measures on this machine, writes, shows, and refuses what makes no sense."""

from __future__ import annotations

import asyncio
import http.server
import itertools
import json
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import Result

from compiled_llm.commands.bench import chart, contenders, latency, tables, timing
from compiled_llm.commands.bench.contenders import BenchSession, Contender, Setup
from compiled_llm.commands.bench.http_client import answer_of
from compiled_llm.commands.bench.load import Asked, Lengths, Load, LoadAnswer, answered, measure_all, pieces_of
from compiled_llm.commands.bench.report import BenchReport
from compiled_llm.commands.bench.timing import CallTiming, Spread, TokenClock, Workload, timed
from support.commands.command_line import invoke
from support.imports import imports, sources
from support.server.running_servers import running_server

PNG = b"\x89PNG"
MACHINE = {"date": "today", "commit": "abc", "versions": {}, "cpu": {"name": "a CPU"}, "gpu": None}
MODEL = {"name": "tiny", "weights": "random", "dtype": "float32"}


def bench(*arguments: str) -> Result:
    return invoke("bench", *arguments)


def read(path: Path) -> dict[str, Any]:
    """What `--json` has written."""
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def new_report() -> BenchReport:
    return BenchReport("compiled-llm bench", {**MACHINE, "versions": {}}, MODEL)


# ---- latency


@pytest.mark.whole
def test_latency_on_this_machine(model_folder: Path, tmp_path: Path) -> None:
    file, plot = tmp_path / "out" / "results.json", tmp_path / "out" / "chart.png"
    quick = ("--batches", "1,2", "--prompts", "8", "--new", "4", "--runs", "2", "--decoding", "both", "--device", "cpu")
    names = "hf-eager,compiled-llm:eager,compiled-llm:cuda-graphs"
    written = ("--json", str(file), "--plot", str(plot))
    done = bench("latency", "--model", str(model_folder), *quick, "--contenders", names, *written)
    assert done.exit_code == 0, done.output
    report = read(file)
    assert sorted((one["contender"], one["batch"], one["sampled"]) for one in report["latency"]) == [
        (name, batch, sampled)
        for name in ("compiled-llm:eager", "hf-eager")
        for batch in (1, 2)
        for sampled in (False, True)
    ]
    assert all(one["figures"]["first_s"]["runs"] == 2 for one in report["latency"])
    assert set(report["unavailable"]) == {"compiled-llm:cuda-graphs"}
    assert report["memory"]["compiled-llm:eager"]["pages"] > 0
    assert report["machine"]["versions"]["torch"] == torch.__version__
    assert plot.read_bytes().startswith(PNG)
    assert "| compiled-llm:eager | 1 |" in done.stdout, "without a terminal, stdout gets Markdown"
    assert all(line.startswith("compiled_llm: still ") for line in done.stderr.splitlines()), "quiet in pipes"


def test_nothing_measured_is_exit_code_1(model_folder: Path) -> None:
    done = bench("latency", "--model", str(model_folder), "--contenders", "compiled-llm:piecewise", "--device", "cpu")
    assert done.exit_code == 1
    assert "Not available: compiled-llm:piecewise: a CPU has no CUDA graphs" in done.stdout


class Scripted(Contender):
    """Answers with known timings, or fails."""

    def __init__(self, name: str, timings: Sequence[CallTiming] = (), error: Exception | None = None) -> None:
        self.name, self._timings, self._error = name, itertools.cycle(timings), error

    @contextmanager
    def opened(self, setup: Setup) -> Iterator[BenchSession]:
        if self._error is not None:
            raise self._error
        yield ScriptedSession(self._timings)


class ScriptedSession(BenchSession):
    def __init__(self, timings: Iterator[CallTiming]) -> None:
        self.versions, self._timings = {"fake": "1.2.3"}, timings

    def prepare(self, workload: Workload) -> None: ...

    def run(self, workload: Workload) -> CallTiming:
        return next(self._timings)

    def memory(self) -> dict[str, int]:
        return {}


def test_rates_follow_their_definitions_and_a_failure_takes_no_other_with_it() -> None:
    setup = Setup("tiny", torch.device("cpu"), torch.float32, [Workload(2, 8, 5)])
    report, saved = new_report(), []
    known = [CallTiming(0.5, 1.5), CallTiming(0.25, 2.25), CallTiming(1.0, 2.0)]
    measured = [
        Scripted("broken", error=ValueError("it broke")),
        Scripted("a", known),
        Scripted("b", [CallTiming(1, 5)]),
    ]
    latency.measure(measured, setup, 3, report, lambda: saved.append(1))
    assert report.failures == ["broken: ValueError: it broke"]
    assert report.machine["versions"] == {"fake": "1.2.3"}
    assert len(saved) == 2
    figures = report.results["latency"][0]["figures"]
    decode = [2 * 4 / 1.0, 2 * 4 / 2.0, 2 * 4 / 1.0]
    assert figures["first_s"] == {"best": 0.25, "median": 0.5, "runs": 3, "p99": None}
    assert (figures["decode_tokens_per_s"]["best"], figures["decode_tokens_per_s"]["median"]) == (
        8.0,
        sorted(decode)[1],
    )
    assert figures["end_to_end_tokens_per_s"]["best"] == pytest.approx(2 * 5 / 1.5)
    assert figures["context"] == 8 + 5 // 2
    (table,) = tables.tables_of(report)
    assert table.rows == [
        ["a", "2", "250.0 / 500.0", "8.00 / 8.00", "1.00", "6.67 / 5.00"],
        ["b", "2", "1,000 / 1,000", "2.00 / 2.00", "0.25", "2.00 / 2.00"],
    ]


def test_the_clock_counts_from_the_call_with_an_idle_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call: 0.5 s, the prompt, 1.5 s to the first token, 0.25 s between tokens, 0.75 s to return, 10 s more."""
    now, clock = [100.0], TokenClock()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def call(tokens: int = 5) -> None:
        now[0] += 0.5
        clock.put("prompt")
        for number in range(tokens):
            now[0] += 0.25 if number else 1.5
            clock.put("token")
        now[0] += 0.75

    def synchronize() -> None:
        now[0] += 10

    assert timed(call, clock, 5, synchronize) == CallTiming(first=2.0, total=3.75 + 10)
    with pytest.raises(RuntimeError, match="11 tokens came instead of 5"):
        timed(call, clock, 5, lambda: None)
    with pytest.raises(ValueError, match="measure more new tokens"):
        timed(lambda: setattr(clock, "times", [now[0]]), clock, 1, lambda: None)


def test_from_100_runs_on_there_is_a_99th_percentile() -> None:
    assert Spread.of_times(range(1, 101)) == Spread(1, 50.5, 100, 99)
    assert Spread.of_times(range(1, 100)).p99 is None


def test_prompts_never_repeat() -> None:
    asked = Workload(2, 50, 4)
    first, again, second = (asked.prompts(1000, number) for number in (0, 0, 1))
    assert first == again
    assert first[0] != first[1]
    assert first != second
    assert all(len(prompt) == 50 and min(prompt) > 0 and max(prompt) < 1000 for prompt in first)


def test_choosing_contenders() -> None:
    def names(asked: str, device: str) -> list[str]:
        return [one.name for one in contenders.choose(asked, device, contenders.ALL)]

    assert names("ours", "cpu") == ["compiled-llm:compile"]
    assert names("ours, hf-eager", "cuda") == ["hf-eager", "compiled-llm:cuda-graphs"]
    assert names("all", "cpu")[0] == "hf-eager"


# ---- serve


@pytest.mark.whole
def test_serve_asks_a_server(socket: Path, tmp_path: Path) -> None:
    with running_server(socket) as server:
        loads = ("--concurrency", "1,3", "--rates", "8", "--seconds", "1", "--requests", "2", "--runs", "2")
        lengths = ("--prompts", "6,8-12", "--answers", "4", "--vocabulary", "100", "--name", "mine")
        done = bench("serve", "--url", f"{server.url}/v1", *loads, *lengths, "--json", str(tmp_path / "serve.json"))
    assert done.exit_code == 0, done.output
    results = read(tmp_path / "serve.json")["serve"]
    found = [(one["contender"], one["load"], one["prompts"]) for one in results]
    ways = ("one after the other", "3 at once", "8 requests/s")
    assert found == [("mine", way, prompts) for way in ways for prompts in ("6", "8 to 12")]
    for one in results:
        assert one["new_tokens"] == 4 * one["requests"]
        assert 0 < one["first_s"]["p50"] <= one["first_s"]["p99"] <= one["end_s"]["most"]
        assert one["short"] == 0
    assert "| mine | 3 at once |" in done.stdout


@contextmanager
def fake_server(events: Sequence[dict[str, Any]], status: int = 200, stall: bool = False) -> Iterator[str]:
    """A server that answers everything with these events, or stands still in the midst of an answer."""
    over = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"data": [{"id": "x"}]}')

        def do_POST(self) -> None:
            self.send_response(status)
            self.end_headers()
            for event in events:
                self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
                self.wfile.flush()
            if stall:
                over.wait()

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        finally:
            over.set()
            server.shutdown()


PIECE = {"choices": [{"text": "a"}]}
USAGE = {"choices": [], "usage": {"completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}}


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize(
    ("server", "said"),
    [
        ({"events": [{"error": "too many"}], "status": 429}, "status 429"),
        ({"events": [PIECE]}, "include_usage"),
        ({"events": [PIECE, {"error": {"message": "gone"}}]}, "gone"),
        ({"events": [PIECE], "stall": True}, "ReadTimeout"),
    ],
)
def test_a_server_that_fails_is_asked_nothing_more(server: dict[str, Any], said: str) -> None:
    with fake_server(**server) as url:
        done = bench("serve", "--url", url, "--concurrency", "1,2", "--requests", "2", "--timeout", "0.5")
    assert done.exit_code == 1
    (failure,) = (line for line in done.stdout.splitlines() if line.startswith("Failed: "))
    assert failure.startswith("Failed: server, one after the other, prompts of 100 tokens: RuntimeError: ")
    assert said in failure


def test_answers_that_are_too_short_are_said() -> None:
    with fake_server([PIECE, USAGE]) as url:
        done = bench("serve", "--url", url, "--concurrency", "1", "--requests", "2", "--answers", "4")
    assert done.exit_code == 0, done.output
    assert "2 answers were shorter than asked for: this server does not know ignore_eos." in done.stdout


def test_a_server_that_is_not_there_is_one_clear_error() -> None:
    done = bench("serve", "--url", "http://127.0.0.1:9/v1")
    assert done.exit_code == 1
    assert "error: http://127.0.0.1:9/v1/models lists no model: ConnectError" in done.output


def test_an_answer_is_read_from_its_events() -> None:
    lines = [f"data: {json.dumps(event)}" for event in (PIECE, PIECE, USAGE)] + ["", ": comment", "data: [DONE]"]
    assert answer_of(list(enumerate(lines))) == LoadAnswer([0, 1], 3, 4)


def test_tokens_that_come_at_once_are_one_piece() -> None:
    assert pieces_of([1.0, 1.00001, 1.00002, 1.01, 1.02, 1.02]) == [1.0, 1.01, 1.02]
    assert pieces_of([]) == []


def test_no_more_requests_run_at_once_than_asked_for_and_arrivals_are_kept() -> None:
    running, most = 0, 0

    async def ask(request: Asked) -> LoadAnswer:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return LoadAnswer([time.perf_counter()], request.new)

    asyncio.run(answered([Asked([1], 1)] * 7, ask, 3))
    assert most == 3
    answers = asyncio.run(answered([Asked([1], 1, arrival) for arrival in (0.0, 0.05)], ask, None))
    assert [answer.begun for answer in answers] == pytest.approx([0.0, 0.05])
    assert answers[1].times[0] > 0.05


def test_passes_have_equal_arrivals_and_lengths_and_other_tokens() -> None:
    load = Load(Lengths(5, 9), Lengths(2, 4), rate=20, seconds=2, system_prompt=3, vocabulary=50)
    first, second = load.drawn(0), load.drawn(1)
    assert [(one.arrival, len(one.prompt), one.new) for one in first] == [
        (one.arrival, len(one.prompt), one.new) for one in second
    ]
    assert 10 < len(first) < 90
    assert all(one.prompt != other.prompt for one, other in zip(first, second, strict=True))
    assert len({tuple(one.prompt[:3]) for one in first}) == 1, "the system prompt"
    assert max(token for one in first for token in one.prompt) < 50
    assert len(Load(Lengths(5, 9), Lengths(2, 4), requests=3, concurrency=8).drawn(0)) == 8


def test_waiting_is_counted_from_when_a_request_was_to_be_sent() -> None:
    def run(asked: Sequence[Asked], concurrency: int | None) -> list[LoadAnswer]:
        return [LoadAnswer([1.5, 1.6, 1.8], 3, 2, begun=1.0), LoadAnswer([2.0, 2.2, 2.4], 3, 0, begun=1.5)][
            : len(asked)
        ]

    report = new_report()
    loads = [Load(Lengths(4, 4), Lengths(3, 3), requests=2, concurrency=1)]
    measure_all({"a": run, "b": run}, loads, 1, report, lambda: None, lambda line: None)
    first, second = report.results["serve"]
    assert (first["contender"], second["contender"]) == ("a", "b")
    assert first["first_s"] == pytest.approx({"p50": 0.5, "p99": 0.5, "most": 0.5})
    assert first["end_s"] == pytest.approx({"p50": 0.8, "p99": 0.9, "most": 0.9})
    assert first["between_s"]["most"] == pytest.approx(0.2)
    assert first["figures"]["tokens_per_s"]["best"] == pytest.approx(6 / 2.4)
    assert (first["cached_tokens"], first["new_tokens"], first["prompt_tokens"]) == (2, 6, 8)


# ---- the chart


def measured() -> list[dict[str, Any]]:
    return [
        {"contender": name, "batch": batch, "prompt": 128, "new": 256, "sampled": sampled, "figures": figures}
        for batch in (1, 8)
        for name, rate in (("vllm", 2.0), ("other", 3.0), ("compiled-llm:cuda-graphs", 5.0), ("hf-eager", 1.0))
        for sampled in (False, True)
        for figures in [{"end_to_end_tokens_per_s": {"median": rate * batch / (2 if sampled else 1)}}]
    ]


@pytest.mark.whole
def test_the_chart_has_greedy_rates_by_batch_size(tmp_path: Path) -> None:
    report = new_report()
    report.results["latency"] = measured()
    speeds = chart.speeds_of(report)
    assert speeds.title == "tiny (random weights, float32) on a CPU: tokens per second, end to end"
    assert (
        speeds.asked == "prompts of 128 tokens, 256 new tokens, greedy; today, commit abc; each panel has its own scale"
    )
    assert speeds.rates["batch 8"] == {"vllm": 16.0, "other": 24.0, "compiled-llm:cuda-graphs": 40.0, "hf-eager": 8.0}
    assert speeds.contenders == ["hf-eager", "vllm", "compiled-llm:cuda-graphs", "other"]
    for kind, begin in (("png", PNG), ("svg", b"<?xml"), ("pdf", b"%PDF")):
        chart.draw(speeds, tmp_path / f"chart.{kind}")
        assert (tmp_path / f"chart.{kind}").read_bytes().startswith(begin)


def test_a_chart_of_something_else_is_refused(tmp_path: Path) -> None:
    report = new_report()
    with pytest.raises(ValueError, match="a chart needs results of `bench latency`"):
        chart.speeds_of(report)
    report.results["latency"] = measured()
    with pytest.raises(ValueError, match=r"the name of a picture ends with \.svg, \.png, \.pdf"):
        chart.draw(chart.speeds_of(report), tmp_path / "chart.jpeg")


# ---- arguments


def test_missing_matplotlib_is_said_before_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = bench("latency", "--plot", "plot.png")
    assert done.exit_code == 2
    assert "pip install '.[bench]'" in done.output


def test_only_commands_import_the_bench_and_only_its_chart_matplotlib() -> None:
    found = [one for one in imports() if one.imported.startswith("compiled_llm.commands.bench")]
    assert {one.importer for one in found if not one.importer.startswith("compiled_llm.commands.bench")} == {
        "compiled_llm.commands.app"
    }
    drawing = [name for name, path in sources().items() if re.search("(import|from) matplotlib", path.read_text())]
    assert drawing == ["compiled_llm.commands.bench.chart"]
