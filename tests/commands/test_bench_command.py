"""`compiled-llm bench`: each command measures on this machine, writes, shows, and refuses what makes no sense."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compiled_llm.commands.bench import contenders, markdown, roofline
from compiled_llm.commands.bench.report import Report
from compiled_llm.commands.bench.workload import Workload
from support.bench import PNG, FakeContender, full_report, invoke, new_report, new_setup

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
    assert report.machine["commit"] == "none", "what is given wins over what git says"
    assert files["png"].read_bytes().startswith(PNG)
    assert files["markdown"].read_text() == markdown.render(report)
    assert markdown.render(report) in done.stdout, "without a terminal, stdout gets Markdown"
    assert all(line.startswith("compiled_llm: still ") for line in done.stderr.splitlines()), "quiet in pipes"


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
        (["latency", "--batches", "1,x"], "--batches '1,x': give comma-separated integers"),
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
    assert "pip install '.[bench]'" in done.output


def test_choosing_contenders() -> None:
    assert [contender.name for contender in contenders.choose("default", "cpu")] == list(contenders.ON_CPU)
    assert [one.name for one in contenders.choose("ours", "cpu")] == ["compiled-llm:compile"]
    assert [one.name for one in contenders.choose("hf-eager,ours", "cuda")] == ["hf-eager", "compiled-llm:cuda-graphs"]
    assert contenders.choose("all", "cpu") == contenders.ALL
    left_out = set(contenders.ALL) - set(contenders.choose("default", "cuda"))
    assert {contender.name for contender in left_out} == {"compiled-llm:pieces", "compiled-llm:cuda-graphs:flashinfer"}
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
