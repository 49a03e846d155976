"""The instrument: its definitions hold, its results say what was measured, and nothing is hidden."""

from __future__ import annotations

import itertools
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM
from typer.testing import CliRunner, Result

from compiled_llm.commands.app import app
from compiled_llm.commands.bench import contenders, latency, markdown, models, plot, roofline, startup
from compiled_llm.commands.bench.contender import Setup
from compiled_llm.commands.bench.local import LocalSession, tokens_to_hold
from compiled_llm.commands.bench.report import Latency, Report, Roofline, Startup
from compiled_llm.commands.bench.step_profiler import StepProfiler
from compiled_llm.commands.bench.tables import tables_of
from compiled_llm.commands.bench.timing import Spread, Timing, TokenClock, timed
from compiled_llm.commands.bench.workload import SAMPLING, Workload, workloads
from compiled_llm.explaining.profile.breakdown import Kernel, Kind, kernels_of, kinds_of, moved_by_decode
from compiled_llm.explaining.profile.kernels import KINDS, Launch, busy_us, kind_of
from compiled_llm.explaining.profile.step_bytes import StepBytes, step_bytes
from support.tiny_models import tiny_llama, tiny_qwen3

CPU = torch.device("cpu")
MACHINE: dict[str, Any] = {
    "date": "today",
    "commit": "abc123",
    "python": "3.12",
    "versions": {"torch": "9.9"},
    "cpu": {"name": "a CPU", "cores": 2, "threads": 2},
    "load": 0.0,
    "gpu": None,
}
PNG = b"\x89PNG"


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments], env={"COLUMNS": "200", "NO_COLOR": "1"})


def new_report(**fields: Any) -> Report:
    model = {"name": "tiny", "weights": "random", "dtype": "float32"}
    machine = {**MACHINE, "versions": dict(MACHINE["versions"])}
    return Report("compiled-llm bench latency", machine, model, **fields)


def new_setup(asked: list[Workload], **commands: str) -> Setup:
    return Setup("tiny", CPU, torch.float32, asked, commands)


def one_latency(contender: str = "a", **fields: Any) -> Latency:
    given: dict[str, Any] = {
        "contender": contender,
        "batch": 2,
        "prompt": 8,
        "new": 5,
        "sampled": False,
        "first_s": [0.5, 0.25, 1.0],
        "total_s": [1.5, 2.25, 2.0],
        "ready_s": 3.0,
        "ceiling": 16.0,
    }
    return Latency(**{**given, **fields})


# ---- definitions


class FakeTime:
    """A clock that moves when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


def streamed(time: FakeTime, clock: TokenClock, tokens: int) -> None:
    """A call: 0.5 s, the prompt, 1.5 s to the first token, 0.25 s between tokens, 0.75 s to return."""
    time.pass_by(0.5)
    clock.put("prompt")
    for number in range(tokens):
        time.pass_by(1.5 if number == 0 else 0.25)
        clock.put("token")
    clock.end()
    time.pass_by(0.75)


def test_first_token_and_end_are_counted_from_the_call() -> None:
    time = FakeTime()
    clock = TokenClock(time)
    timing = timed(lambda: streamed(time, clock, 5), clock, 5, lambda: None)
    assert timing == Timing(first=0.5 + 1.5, total=0.5 + 1.5 + 4 * 0.25 + 0.75)


def test_device_is_idle_before_the_call_and_at_its_end() -> None:
    """What the device still does when the call returns belongs to it, what it did before does not."""
    time = FakeTime()
    clock = TokenClock(time)
    timing = timed(lambda: streamed(time, clock, 5), clock, 5, lambda: time.pass_by(10))
    assert timing == Timing(first=2.0, total=3.75 + 10)


def test_missing_tokens_are_an_error() -> None:
    time = FakeTime()
    clock = TokenClock(time)
    with pytest.raises(RuntimeError, match="4 tokens came instead of 5"):
        timed(lambda: streamed(time, clock, 4), clock, 5, lambda: None)


@pytest.mark.parametrize(("first", "total"), [(1.0, 1.0), (2.0, 1.0), (0.0, 1.0)])
def test_timing_without_decode_is_refused(first: float, total: float) -> None:
    with pytest.raises(ValueError, match="decode cannot be told apart"):
        Timing(first, total)


def test_rates_follow_their_definitions() -> None:
    result = one_latency()
    decode = [2 * 4 / 1.0, 2 * 4 / 2.0, 2 * 4 / 1.0]
    assert (result.first.best, result.first.median, result.first.runs) == (0.25, 0.5, 3)
    assert (result.decode.best, result.decode.median) == (max(decode), sorted(decode)[1])
    assert result.end_to_end.best == pytest.approx(2 * 5 / 1.5)
    assert result.end_to_end.median == pytest.approx(2 * 5 / 2.0)
    assert result.of_ceiling == pytest.approx(result.decode.median / 16.0)
    assert result.workload.context == 8 + 5 // 2


def test_stages_of_startup_are_summarised_as_times() -> None:
    spread = Startup("a", "warm", {"loaded": [3.0, 1.0, 8.0]}).stage("loaded")
    assert (spread.best, spread.median, spread.runs) == (1.0, 3.0, 3)


# ---- workloads


def test_contexts_are_met_in_the_middle_of_decode() -> None:
    (found,) = workloads([1], [], [100], [32], [False])
    assert (found.prompt, found.context) == (100 - 16, 100)
    with pytest.raises(ValueError, match="context 16"):
        workloads([1], [], [16], [32], [False])


def test_every_combination_comes_once() -> None:
    found = workloads([1, 8], [16, 32], [24], [16], [False, True])  # a context of 24 is a prompt of 16
    assert len(found) == len(set(found)) == 2 * 2 * 2


def test_prompts_never_repeat() -> None:
    asked = Workload(2, 50, 4)
    first, again, second = (asked.prompts(1000, number) for number in (0, 0, 1))
    assert first == again
    assert first[0] != first[1]
    assert first != second
    assert all(len(prompt) == 50 and min(prompt) > 0 and max(prompt) < 1000 for prompt in first)


def test_pages_hold_the_largest_workload() -> None:
    small, large = Workload(1, 100, 4), Workload(3, 17, 15)  # 7 pages; 3 times 2 pages
    assert tokens_to_hold([small], 16) == (7 + 1) * 16
    assert tokens_to_hold([small, large], 16) == 3 * (2 + 1) * 16


# ---- bytes


def test_bytes_of_a_step_are_weights_once_and_each_rows_keys_and_values() -> None:
    model = tiny_qwen3()  # 2 layers, 2 kv heads of 16, vocabulary 128, hidden 64, not tied
    everything = sum(parameter.nbytes for parameter in model.parameters())
    nbytes = step_bytes(model, context=10)
    assert nbytes.weights == everything - 128 * 64 * 4
    assert nbytes.kv_written == 2 * 2 * 2 * 16 * 4
    assert nbytes.kv_per_row == 10 * nbytes.kv_written
    assert nbytes.total(3) == nbytes.weights + 3 * nbytes.kv_per_row


def test_tied_embedding_is_read_whole() -> None:
    model = tiny_llama(tie_word_embeddings=True)
    assert step_bytes(model, 10).weights == sum(parameter.nbytes for parameter in model.parameters())


def test_windows_bound_what_is_read() -> None:
    model = tiny_qwen3(use_sliding_window=True, sliding_window=4, max_window_layers=1)
    kinds = model.config.layer_types
    token = 2 * 2 * 16 * 4
    assert sorted(kinds) == ["full_attention", "sliding_attention"]
    assert step_bytes(model, 10).kv_per_row == (10 + 4) * token


def test_ceiling_of_experts_is_not_known() -> None:
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = MixtralForCausalLM(MixtralConfig(**sizes, **heads, num_local_experts=2))
    assert step_bytes(model, 10).total(1) is None


# ---- fake contenders


class FakeSession:
    """Answers with known timings."""

    def __init__(self, timings: list[Timing]) -> None:
        self.timings = itertools.cycle(timings)
        self.versions = {"fake": "1.2.3"}
        self.prepared: list[Workload] = []

    def prepare(self, workload: Workload) -> None:
        self.prepared.append(workload)

    def run(self, workload: Workload) -> Timing:
        assert workload in self.prepared, "a run before it was warm"
        return next(self.timings)

    def memory(self) -> dict[str, int]:
        return {"weights": 2**20}


@dataclass
class FakeContender:
    name: str
    timings: list[Timing] = field(default_factory=lambda: [Timing(1.0, 3.0)])
    reason: str | None = None
    error: Exception | None = None
    summary: str = "fake"

    def obstacle(self, setup: Setup) -> str | None:
        return self.reason

    @contextmanager
    def opened(self, setup: Setup) -> Iterator[FakeSession]:
        if self.error is not None:
            raise self.error
        yield FakeSession(self.timings)

    @contextmanager
    def worker(self, setup: Setup) -> Iterator[list[str]]:
        yield ["false"]


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


# ---- reports


def full_report() -> Report:
    sampled = one_latency("a", sampled=True, total_s=[1.51, 2.25, 2.01])
    rates = [one_latency("a"), one_latency("b", total_s=[1.0, 1.25, 1.75], ceiling=None), sampled]
    rates += [replace(result, batch=8) for result in rates]
    rates += [replace(result, prompt=64) for result in rates]
    starts = [Startup("a", cache, {"imported": [1.0, 2.0], "all tokens": [4.0, 3.0]}) for cache in ("cold", "warm")]
    steps = Roofline(
        contender="a",
        batch=1,
        prompt=8,
        new=16,
        sampled=False,
        measured="kernels",
        step_us=100.0,
        busy_us=80.0,
        steps=4,
        weight_bytes=40_000,
        kv_bytes=10_000,
        read_bandwidth=1e9,
        host_us=30.0,
        kinds=[Kind("matrix products", 50.0, 7.0, 40_000), Kind("attention", 30.0, 2.0, 10_000)],
        kernels=[Kernel("gemv<a|b>", 50.0, 7.0)],
    )
    return new_report(
        read_bandwidth=1e9,
        latency=rates,
        startup=starts,
        roofline=[steps],
        memory={"a": {"weights": 3 * 2**20}},
        unavailable={"vllm": "not installed"},
        failures=["b: it broke"],
    )


def test_json_holds_everything(tmp_path: Path) -> None:
    report = full_report()
    report.save(tmp_path / "deep" / "results.json")
    assert Report.load(tmp_path / "deep" / "results.json") == report
    found = json.loads((tmp_path / "deep" / "results.json").read_text())
    assert found["machine"]["commit"] == "abc123"
    figures = found["latency"][0]["figures"]
    assert figures["first_s"] == {"best": 0.25, "median": 0.5, "runs": 3, "p99": None}
    assert figures["decode_tokens_per_s"]["median"] == 8.0
    assert found["roofline"][0]["figures"]["of_bandwidth"] == pytest.approx(50_000 / 100e-6 / 1e9)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 0}', '{"schema": 1, "latency": [{"x": 1}]}'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"other\.json is no result of compiled-llm bench"):
        Report.load(path)


def rows_of(report: Report, title: str) -> list[list[str]]:
    (table,) = (table for table in tables_of(report) if table.title == title)
    assert all(len(row) == len(table.columns) for row in table.rows)
    return table.rows


def test_latency_table_has_the_figures_and_ratios_to_the_first_contender() -> None:
    rows = rows_of(full_report(), "Prompts of 8 tokens, 5 new tokens, greedy")
    assert rows[0] == ["a", "2", "250.0 / 500.0", "8.00 / 8.00", "1.00", "50%", "6.67 / 5.00"]
    assert rows[1][:2] == ["b", "2"]
    assert rows[1][4] == f"{(8 / 0.75) / 8:.2f}", "of medians"
    assert rows[1][5] == ""
    assert [row[:2] for row in rows[2:]] == [["a", "8"], ["b", "8"]]


def test_ratio_is_left_out_where_the_first_contender_failed() -> None:
    report = new_report(latency=[one_latency("a"), one_latency("b"), one_latency("b", batch=4)])
    rows = rows_of(report, "Prompts of 8 tokens, 5 new tokens, greedy")
    assert [row[4] for row in rows] == ["1.00", "1.00", ""]


def test_cost_of_sampling_is_that_of_a_decode_step() -> None:
    greedy = one_latency("a", new=11, first_s=[1.0], total_s=[2.0])
    drawn = one_latency("a", new=11, first_s=[1.0], total_s=[2.03], sampled=True)
    assert rows_of(new_report(latency=[greedy, drawn]), "Sampled over greedy") == [["a", "2", "8 + 11", "+3.0%"]]


def test_roofline_table_adds_up() -> None:
    rows = rows_of(full_report(), "A decode step of a, batch 1, 8 + 16 tokens, greedy")
    assert rows[0] == ["matrix products", "7.0", "50.0", "50.0%", "0.0", "80.0%"]
    assert rows[-2][:4] == ["gaps: no kernel runs", "", "20.0", "20.0%"]
    assert rows[-1][:4] == ["one decode step", "9.0", "100.0", "100%"]
    assert rows[-1][5] == "50.0%"


def test_markdown_is_well_formed_and_carries_the_header() -> None:
    text = markdown.render(full_report())
    for part in ("a CPU", "torch 9.9", "commit abc123", "1.0 GB/s", "`compiled-llm bench latency`", "gemv<a\\|b>"):
        assert part in text
    widths = [line.replace("\\|", "").count("|") for line in text.splitlines()]
    for before, after in itertools.pairwise(widths):
        assert before == after or 0 in (before, after), "a row has another number of cells than the one above"


@pytest.mark.parametrize("kind", ["latency", "startup", "roofline"])
def test_plots_are_pictures(tmp_path: Path, kind: str) -> None:
    report = full_report()
    for other in {"latency", "startup", "roofline"} - {kind}:
        setattr(report, other, [])
    plot.draw(report, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(PNG)


def test_curves_are_the_medians() -> None:
    figure = plot.draw_latency(full_report().latency)
    over_batch, over_context, shares, _ = figure.axes
    lines = {str(line.get_label()): line for line in over_batch.get_lines()}
    assert list(lines) == ["a, greedy", "a, sampled", "b, greedy", "ceiling: read bandwidth"]
    assert lines["b, greedy"].get_xydata().tolist() == [[2, 2 * 4 / 0.75], [8, 8 * 4 / 0.75]]
    assert [line.get_xdata()[0] for line in over_context.get_lines()] == [10] * 4
    assert [str(line.get_label()) for line in shares.get_lines()] == ["a, greedy", "a, sampled"]  # b has no ceiling
    for panel in figure.axes:
        assert panel.get_xlabel()
        assert panel.get_ylabel()


# ---- the profiler


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("_decode_paged_attention", "attention"),
        ("void flashinfer::BatchDecodeWithPagedKVCacheKernel<...>", "attention"),
        ("void flashinfer::BatchPrefillWithPagedKVCacheKernel<...>", "attention"),
        ("void flashinfer::PersistentVariableLengthMergeStatesKernel<...>", "attention, merge of splits"),
        ("void flashinfer::AppendPagedKVCacheKernel<128u, ...>", "page append"),
        ("nvjet_tst_64x8_64x16_2x1_v_bz_splitK_TNT", "matrix products"),
        ("triton_red_fused_mm_3", "matrix products"),
        ("void gemv2T_kernel_val<int, int, __nv_bfloat16, ...>", "matrix products"),
        ("triton_red_fused_argmax_9", "sampling"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0", "norms, rotary, elementwise"),
        ("Memcpy DtoH (Device -> Pinned)", "memory copies"),
        ("aten::addmm", "matrix products"),
    ],
)
def test_kernels_are_told_apart(name: str, kind: str) -> None:
    assert kind_of([name]) == kind


def test_operators_inside_attention_are_attention() -> None:
    assert kind_of(["aten::bmm", "compiled_llm::paged_attention"]) == "attention"
    assert kind_of(["aten::index_put_", "compiled_llm::append_paged_kv"]) == "page append"
    assert kind_of(["aten::mm", "aten::linear"]) == "matrix products"


def test_overlapping_kernels_are_busy_once() -> None:
    spans = [(0.0, 10.0), (5.0, 8.0), (9.0, 12.0), (20.0, 21.0)]
    assert busy_us(Launch("k", "attention", end - start, start, end) for start, end in reversed(spans)) == 13.0


def test_kinds_are_averages_over_the_steps_and_carry_their_bytes() -> None:
    launches = [
        Launch("a", "attention", 3.0, 0, 3),
        Launch("a", "attention", 5.0, 4, 9),
        Launch("m", KINDS[5][0], 2, 9, 11),
    ]
    nbytes = StepBytes(weights=1000, kv_per_row=10, kv_written=1)
    attention, products = kinds_of(launches, 2, moved_by_decode(nbytes, batch=3))
    assert attention == Kind("attention", 4.0, 1.0, 30)
    assert products == Kind("matrix products", 1.0, 0.5, 1000)
    assert kernels_of(launches, 2) == [Kernel("a", 4.0, 1.0), Kernel("m", 1.0, 0.5)]


@pytest.mark.parametrize("name", ["hf-eager", "compiled-llm:eager"])
@pytest.mark.parametrize("new", [4, 9, 40])
def test_profiler_sees_exactly_the_steps_it_says(name: str, new: int) -> None:
    """Whether the loop reads each step's tokens at once (HuggingFace) or a step late (ours)."""
    asked = Workload(2, 8, new)
    (contender,) = contenders.choose(name, "cpu")
    with contender.opened(new_setup([asked])) as session:
        assert isinstance(session, LocalSession)
        session.prepare(asked)
        result = roofline.measure_step(name, session, asked, 2, 1e9)
    layers = models.SHAPES["tiny"]["num_hidden_layers"]
    calls = {kernel.name: kernel.launches for kernel in result.kernels}
    attention = {"hf-eager": "aten::_scaled_dot_product_flash_attention_for_cpu"}
    assert calls[attention.get(name, "compiled_llm::decode_attention")] == layers
    assert result.steps == min(16, new // 2)
    assert (result.host_us is None) == (name == "hf-eager")
    assert result.kv_bytes == 2 * step_bytes(session.model, asked.context).kv_per_row


def profile_nothing() -> None:
    with StepProfiler(CPU, steps=1, after=1) as profiler:
        for _ in range(3):
            profiler.clock.put("the prompt, then tokens")


def test_profiler_that_saw_nothing_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="saw nothing"):
        profile_nothing()


# ---- engines in processes of their own

WORKER = """
import json, os, sys
CACHES = {caches}
def say(**message):
    print(json.dumps(message), flush=True)
folders = {{name: os.environ.get(name, "") for name in CACHES}}
empty = all(not os.path.isdir(path) or not os.listdir(path) for path in folders.values())
for path in folders.values():
    if path:
        open(os.path.join(path, "compiled"), "w").close()
with open({log!r}, "a") as log:
    print(json.dumps([folders, empty, sys.argv[1:]]), file=log)
say(mark="imported", versions={{"vllm": "7.7"}})
say(mark="loaded")
for line in sys.stdin:
    request = json.loads(line)
    say(mark="first token")
    say(first=0.25, total=1.25, tokens=request["batch"] * request["new"] - {missing})
"""


@dataclass
class FakeEngine:
    """A program that takes the place of Python with an engine, and what it wrote down."""

    command: str
    log: Path

    def starts(self) -> list[Any]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]


def fake_engine(folder: Path, missing: int = 0) -> FakeEngine:
    log = folder / "starts.log"
    script = folder / "engine.py"
    caches = [name for name in startup.CACHES if name != "PYTHONPYCACHEPREFIX"]  # which the program itself fills
    script.write_text(WORKER.format(caches=caches, log=str(log), missing=missing))
    return FakeEngine(shlex.join([sys.executable, str(script)]), log)


def test_engine_in_another_process_is_measured(tmp_path: Path) -> None:
    engine = fake_engine(tmp_path)
    path = tmp_path / "results.json"
    arguments = ("--model", "tiny", "--batches", "3", "--prompts", "8", "--new", "5", "--runs", "2")
    done = invoke("latency", *arguments, "--contenders", "vllm", "--vllm", engine.command, "--json", str(path))
    assert done.exit_code == 0, done.output
    (result,) = Report.load(path).latency
    assert (result.first_s, result.total_s) == ([0.25, 0.25], [1.25, 1.25])
    assert result.decode.median == 3 * 4
    assert Report.load(path).machine["versions"]["vllm"] == "7.7"


def test_engine_that_comes_short_is_a_failure(tmp_path: Path) -> None:
    engine = fake_engine(tmp_path, missing=1)
    arguments = ("--model", "tiny", "--batches", "2", "--prompts", "8", "--new", "5", "--contenders", "vllm")
    done = invoke("latency", *arguments, "--vllm", engine.command)
    assert done.exit_code == 1
    assert "Failed: vllm, batch 2, 8 + 5 tokens, greedy: RuntimeError: 9 tokens came instead of 10" in done.stdout


def test_engine_that_dies_says_why(tmp_path: Path) -> None:
    script = tmp_path / "dies.py"
    script.write_text("import sys; sys.exit('loading\\nValueError: no CUDA for you\\nleft in peace')")
    done = invoke("latency", "--model", "tiny", "--contenders", "vllm", "--vllm", f"{sys.executable} {script}")
    assert done.exit_code == 1
    assert "the worker ended with exit code 1: ValueError: no CUDA for you" in done.stdout


ENGINE_PACKAGE = """
import json
import time
__version__ = "0.0.1"
LOG = {log!r}

def note(*what):
    with open(LOG, "a") as log:
        print(json.dumps(what), file=log)

passed = 0
time.perf_counter = lambda: passed

def spend(seconds):
    global passed
    passed += seconds

class Out:
    def __init__(self, tokens):
        self.token_ids = [1] * tokens
        self.outputs = [self]

class SamplingParams:
    def __init__(self, **settings):
        self.settings = settings

class LLM:
    def __init__(self, **settings):
        print("an engine that logs to stdout")
        note("load", settings, json.load(open(settings["model"] + "/config.json")))

    def generate(self, prompts, parameters, use_tqdm):
        note("run", [prompt["prompt_token_ids"] for prompt in prompts], parameters.settings)
        spend(2 + parameters.settings["max_tokens"])
        return [Out(parameters.settings["max_tokens"]) for _ in prompts]

class Engine:
    def __init__(self, **settings):
        note("load", settings, json.load(open(settings["model_path"] + "/config.json")))

    def generate(self, input_ids, sampling_params):
        note("run", input_ids, sampling_params)
        spend(2 + sampling_params["max_new_tokens"])
        return [{{"output_ids": [1] * sampling_params["max_new_tokens"]}} for _ in input_ids]

    def shutdown(self):
        note("shutdown")
"""


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_engines_are_asked_for_the_same_work(tmp_path: Path, name: str) -> None:
    """The worker runs where nothing of ours is installed: only the engine's package, here a stand-in with a clock."""
    log = tmp_path / "calls.log"
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / f"{name}.py").write_text(ENGINE_PACKAGE.format(log=str(log)))
    command = f"env PYTHONPATH={tmp_path / 'site'} {sys.executable} -S"
    arguments = ("--model", "tiny", "--batches", "2", "--prompts", "8", "--new", "64", "--runs", "2")
    done = invoke(
        "latency", *arguments, "--decoding", "both", "--contenders", name, f"--{name}", command, "--json",
        str(tmp_path / "results.json"),
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    calls = [json.loads(line) for line in log.read_text().splitlines()]
    load, runs = calls[0], [call for call in calls if call[0] == "run"]
    assert load[1]["load_format"] == "dummy"
    assert load[1]["dtype"] == "float32"
    assert {key: load[2][key] for key in models.SHAPES["tiny"]} == models.SHAPES["tiny"]
    prompts = [json.dumps(call[1]) for call in runs]
    assert len(set(prompts)) == len(prompts) == 2 * 2 * (2 + 2), "no cache of prefixes may hit"
    assert all([len(prompt) for prompt in call[1]] == [8, 8] for call in runs)
    settings = [call[2] for call in runs]
    length = "max_tokens" if name == "vllm" else "max_new_tokens"
    assert [found[length] for found in settings] == [1, 64] * 8
    assert all(found["ignore_eos"] for found in settings)
    assert [found["temperature"] for found in settings] == [0.0] * 8 + [SAMPLING["temperature"]] * 8
    assert settings[-1]["top_k"] == SAMPLING["top_k"]
    assert (["shutdown"] in calls) == (name == "sglang")
    report = Report.load(tmp_path / "results.json")
    assert report.machine["versions"][name] == "0.0.1"
    assert [(result.first_s, result.total_s) for result in report.latency] == [([3, 3], [66, 66])] * 2


# ---- startup


def test_cold_starts_have_empty_caches_and_warm_ones_those_of_the_last(tmp_path: Path) -> None:
    engine = fake_engine(tmp_path)
    path = tmp_path / "results.json"
    arguments = ("--model", "tiny", "--contenders", "vllm", "--vllm", engine.command, "--json", str(path))
    done = invoke("startup", *arguments, "--cold-runs", "2", "--runs", "3")
    assert done.exit_code == 0, done.output
    cold, warm = Report.load(path).startup
    assert (cold.cache, warm.cache) == ("cold", "warm")
    assert set(cold.stages) == set(startup.STAGES)
    assert {len(times) for times in cold.stages.values()} == {2}
    assert {len(times) for times in warm.stages.values()} == {3}
    for found in (cold, warm):
        for run in zip(*(found.stages[stage] for stage in startup.STAGES), strict=True):
            assert list(run) == sorted(run)
    folders, empty = zip(*(start[:2] for start in engine.starts()), strict=True)
    assert list(empty) == [True, True, False, False, False]
    assert folders[0] != folders[1] == folders[2] == folders[3] == folders[4]
    assert all(all(found.values()) for found in folders)
    assert not any(Path(path).exists() for path in folders[0].values()), "caches are left behind"


@pytest.mark.slow
def test_startup_of_this_environment(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    arguments = ("--model", "tiny", "--prompt", "8", "--new", "4", "--runs", "0", "--json", str(path))
    done = invoke("startup", *arguments, "--contenders", "hf-eager,compiled-llm:eager")
    assert done.exit_code == 0, done.output
    assert [(result.contender, result.cache) for result in Report.load(path).startup] == [
        ("hf-eager", "cold"),
        ("compiled-llm:eager", "cold"),
    ]


# ---- the command

QUICK = ("--model", "tiny", "--batches", "1,2", "--prompts", "8", "--new", "4", "--runs", "2")


def test_latency_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/compiled-llm", "bench", "latency"])
    files = {name: tmp_path / "out" / f"results.{name}" for name in ("json", "markdown", "png")}
    done = invoke(
        "latency", *QUICK, "--decoding", "both", "--device", "cpu", "--commit", "none",
        "--contenders", "hf-eager,hf-static,compiled-llm:eager,sglang",
        "--json", str(files["json"]), "--markdown", str(files["markdown"]), "--plot", str(files["png"]),
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    report = Report.load(files["json"])
    assert [(result.contender, result.batch, result.sampled) for result in report.latency] == [
        (name, batch, sampled)
        for name in ("hf-eager", "compiled-llm:eager")
        for sampled in (False, True)
        for batch in (1, 2)
    ]
    assert all(result.first.runs == 2 and result.ceiling for result in report.latency)
    assert set(report.unavailable) == {"hf-static", "sglang"}
    assert report.memory["compiled-llm:eager"]["pages"] > 0
    assert report.read_bandwidth is not None
    assert report.command == "compiled-llm bench latency"
    assert report.machine["versions"]["torch"] == torch.__version__
    assert report.machine["commit"]
    assert files["png"].read_bytes().startswith(PNG)
    assert files["markdown"].read_text() == markdown.render(report)
    assert markdown.render(report) in done.stdout, "without a terminal, stdout gets Markdown"
    assert done.stderr == "", "quiet in pipes"


def test_roofline_on_this_machine(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    arguments = ("--model", "tiny", "--prompts", "8", "--new", "12", "--runs", "2", "--device", "cpu")
    done = invoke("roofline", *arguments, "--contenders", "compiled-llm:eager", "--json", str(path))
    assert done.exit_code == 0, done.output
    (result,) = Report.load(path).roofline
    assert {"attention", "matrix products"} <= {kind.name for kind in result.kinds}
    assert result.measured == "operators"


def test_roofline_says_what_the_profiler_cannot_see(tmp_path: Path) -> None:
    report = new_report(read_bandwidth=1e9)
    roofline.measure([FakeContender("engine")], new_setup([Workload(1, 8, 4)]), 1, report, lambda: None)
    assert report.unavailable == {"engine": "runs in another process, into which the profiler does not see"}
    assert report.failures == []


def test_nothing_measured_is_exit_code_1() -> None:
    done = invoke("latency", "--model", "tiny", "--contenders", "sglang")
    assert done.exit_code == 1
    assert "Not available: sglang: not installed here" in done.stdout


def test_results_are_shown_again(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    full_report().save(path)
    done = invoke("show", str(path), "--plot", str(tmp_path / "plot.png"))
    assert done.exit_code == 0, done.output
    assert done.stdout == markdown.render(full_report())
    assert (tmp_path / "plot.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["latency", "--contenders", "nosuch"], "no nosuch; there are hf-eager"),
        (["latency", "--batches", "1,x"], "--batches '1,x': give integers"),
        (["latency", "--batches", "0"], "--batches '0': each must be at least 1"),
        (["latency", "--new", "1"], "at least 2 are needed"),
        (["latency", "--contexts", "10"], "context 10"),
        (["latency", "--runs", "0"], "--runs"),
        (["roofline", "--new", "3"], "--new"),
        (["latency", "--model", "tiny", "--new", "50000"], "40960 positions"),
        (["latency", "--model", "/no/such/folder"], "there is no such file or folder"),
        (["show", "/no/such/file"], "/no/such/file"),
        (["nosuch"], "nosuch"),
    ],
)
def test_bad_arguments_give_one_clear_error(arguments: list[str], message: str) -> None:
    done = invoke(*arguments)
    assert done.exit_code == 2, done.output
    assert message in done.output
    assert "Traceback" not in done.output


def test_missing_matplotlib_is_said_before_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = invoke("latency", *QUICK, "--plot", "plot.png")
    assert done.exit_code == 2
    assert "pip install 'compiled-llm[bench]'" in done.output


def test_choosing_contenders() -> None:
    assert [contender.name for contender in contenders.choose("default", "cpu")] == list(contenders.ON_CPU)
    assert contenders.choose("default", "cuda") == contenders.ALL == contenders.choose("all", "cpu")
    chosen = contenders.choose("vllm, hf-eager", "cpu")
    assert [contender.name for contender in chosen] == ["hf-eager", "vllm"]


def test_gguf_is_not_for_engines() -> None:
    setup = replace(new_setup([Workload(1, 8, 4)], vllm="python3"), name="demo")
    (contender,) = contenders.choose("vllm", "cpu")
    assert "reads no GGUF file" in (contender.obstacle(setup) or "")


def test_the_package_imports_neither_the_bench_nor_matplotlib(tmp_path: Path) -> None:
    code = """
import sys
import compiled_llm
compiled_llm.wrap
assert "torch" in sys.modules
assert not [name for name in sys.modules if name.startswith(("compiled_llm.commands", "matplotlib"))]
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
