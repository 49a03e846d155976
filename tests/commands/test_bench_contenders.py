"""Contenders side by side: each is measured warm, and one that fails does not hide the others."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from compiled_llm.commands.bench import contenders, latency, markdown, models
from compiled_llm.commands.bench.contender import Setup
from compiled_llm.commands.bench.contenders.ours import Ours
from compiled_llm.commands.bench.local import LocalSession
from compiled_llm.commands.bench.report import Report
from compiled_llm.commands.bench.tables import tables_of
from compiled_llm.commands.bench.timing import Spread, Timing
from compiled_llm.commands.bench.workload import Workload
from compiled_llm.config import Backend, Mode
from compiled_llm.explaining.profile.step_bytes import step_bytes
from support.bench import CPU, FakeContender, FakeSession, new_report, new_setup, one_latency


def measured(*taking_part: FakeContender, asked: list[Workload] | None = None, runs: int = 5) -> Report:
    report = new_report(read_bandwidth=1e9)
    latency.measure(taking_part, new_setup(asked or [Workload(2, 8, 5)]), runs, report, lambda: None)
    return report


def test_results_are_what_the_contender_did() -> None:
    timings = [Timing(0.5, 1.5), Timing(0.25, 2.25), Timing(1.0, 2.0)]
    (result,) = measured(FakeContender("a", timings), runs=3).latency
    assert (result.contender, result.first_s, result.total_s) == ("a", [0.5, 0.25, 1.0], [1.5, 2.25, 2.0])


def test_number_of_runs_is_that_asked_for() -> None:
    for runs in (1, 5, 6):
        (result,) = measured(FakeContender("a"), runs=runs).latency
        assert result.first.runs == result.decode.runs == result.end_to_end.runs == runs


def test_percentiles_need_a_hundred_runs() -> None:
    times = [float(number) for number in range(200, 0, -1)]
    assert Spread.of_times(times).p99 == 198.0
    assert Spread.of_times(times[:99]).p99 is None
    assert Spread.of_rates(times).p99 is None


def test_the_first_tokens_percentile_is_shown_where_there_is_one() -> None:
    first = [0.001 * number for number in range(1, 101)]
    for runs, shown in ((first, "1.00 / 50.5 / 99.0"), (first[:99], "1.00 / 50.0")):
        result = one_latency("a", first_s=runs, total_s=[2.0] * len(runs))
        (table,) = tables_of(new_report(latency=[result]))
        assert table.rows[0][2] == shown
        assert ("99th percentile" in (table.note or "")) == (len(runs) == 100)


def test_best_is_never_worse_than_the_median() -> None:
    timings = [Timing(first / 7, first / 7 + total / 3) for first, total in itertools.product(range(1, 5), repeat=2)]
    (result,) = measured(FakeContender("a", timings), runs=7).latency
    assert result.first.best <= result.first.median
    assert result.decode.best >= result.decode.median
    assert result.end_to_end.best >= result.end_to_end.median


def test_ceiling_is_bandwidth_over_bytes() -> None:
    (result,) = measured(FakeContender("a"), asked=[Workload(3, 8, 4)]).latency
    nbytes = step_bytes(models.build("tiny", CPU, torch.float32), 10).total(3)
    assert nbytes is not None
    assert result.ceiling == pytest.approx(3 * 1e9 / nbytes)


def test_unavailable_and_failing_contenders_do_not_stop_the_others() -> None:
    report = measured(
        FakeContender("missing", reason="not installed"),
        FakeContender("broken", error=RuntimeError("out of\nmemory")),
        FakeContender("a"),
    )
    assert [result.contender for result in report.latency] == ["a"]
    assert report.unavailable == {"missing": "not installed"}
    assert report.failures == ["broken: RuntimeError: out of memory"]
    assert report.machine["versions"]["fake"] == "1.2.3"
    text = markdown.render(report)
    assert "Not available: missing: not installed." in text
    assert "Failed: broken: RuntimeError: out of memory" in text


def test_failing_workload_keeps_earlier_results_and_is_named() -> None:
    class Fading(FakeContender):
        @contextmanager
        def opened(self, setup: Setup) -> Iterator[FakeSession]:
            session = FakeSession(self.timings)
            session.timings = iter(self.timings)  # type: ignore[assignment]
            yield session

    asked = [Workload(1, 8, 5), Workload(2, 8, 5)]
    report = measured(Fading("a", [Timing(1.0, 3.0)] * 3), FakeContender("b"), asked=asked, runs=2)
    assert [(result.contender, result.batch) for result in report.latency] == [("a", 1), ("b", 1), ("b", 2)]
    assert report.failures == ["a, batch 2, 8 + 5 tokens, greedy: StopIteration: "]


def test_session_is_warm_after_as_many_calls_as_it_needs() -> None:
    asked = Workload(1, 8, 4)
    setup = new_setup([asked])
    calls: list[Workload] = []

    class Counting(LocalSession):
        def run(self, workload: Workload) -> Timing:
            calls.append(workload)
            return Timing(1.0, 2.0)

    for warm_calls in (1, 3):
        calls.clear()
        Counting(setup, setup.model(), warm_calls).prepare(asked)
        assert calls == [asked] * warm_calls
    calls.clear()
    Counting(setup, setup.model(), compiles=False).prepare(Workload(1, 8, 256))
    assert calls == [Workload(1, 8, 16)], "a few tokens are enough where nothing is compiled"


def test_model_is_given_back_as_it_was() -> None:
    asked = Workload(1, 8, 4)
    setup = new_setup([asked])
    plain = type(setup.model())
    (contender,) = contenders.choose("compiled-llm:eager", "cpu")
    with contender.opened(setup) as session:
        assert isinstance(session, LocalSession)
        assert type(session.model) is not plain
        session.prepare(asked)
    assert type(setup.model()) is plain
    assert not hasattr(setup.model(), "compiled")


@pytest.mark.parametrize("backend", ["auto", "flashinfer"])
def test_a_backend_is_handed_to_wrap(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrap(model: object, **given: Any) -> None:
        raise RuntimeError(f"backend={given['backend']}")

    monkeypatch.setattr("compiled_llm.commands.bench.contenders.ours.compiled_llm.wrap", wrap)
    contender, setup = Ours("compile", backend), new_setup([Workload(1, 8, 4)])
    with pytest.raises(RuntimeError, match=f"backend={backend}"), contender.opened(setup):
        pass
    assert (contender.obstacle(setup) is None) == (backend == "auto")
    assert contender.obstacle(replace(setup, device=torch.device("cuda"))) is None


@pytest.mark.parametrize("mode", ["reduce-overhead", "cuda-graphs", "piecewise"])
def test_a_mode_that_a_cpu_does_not_have_is_named_as_what_it_is_there(mode: Mode) -> None:
    setup = new_setup([Workload(1, 8, 4)])
    assert "this mode is compiled-llm:compile there" in (Ours(mode).obstacle(setup) or "")
    assert Ours(mode).obstacle(replace(setup, device=torch.device("cuda"))) is None
