"""The scripts of `tools/bench` run: each on a tiny model on the CPU, and vLLM's part on a stand-in."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import MixtralConfig, MixtralForCausalLM
from typer.testing import CliRunner

from compiled_llm.commands.bench.report import BenchReport
from compiled_llm.compilation.sampling.sampling import Sampling
from compiled_llm.model.packed.part import formats_of
from compiled_llm.model.version.tensors import tensors_of
from support.docs.pages import CHECKOUT
from support.ops.sampling_cases import tables_of
from support.tiny_models import tiny_llama, tiny_qwen3

TOOLS = CHECKOUT / "tools" / "bench"
pytestmark = pytest.mark.skipif(not TOOLS.is_dir(), reason="no checkout")

ENGINE = """
import json
import time
__version__ = "0.0.1"

def note(*what):
    with open({log!r}, "a") as log:
        print(json.dumps(what), file=log)

class Out:
    def __init__(self, tokens):
        self.token_ids, self.outputs, self.num_cached_tokens = [1] * tokens, [self], 0

class SamplingParams:
    def __init__(self, **settings):
        self.settings = settings

class LLM:
    def __init__(self, **settings):
        print("an engine that logs to stdout")
        note("load", settings, json.load(open(settings["model"] + "/config.json")))

    def generate(self, prompts, parameters, use_tqdm):
        note("run", [prompt["prompt_token_ids"] for prompt in prompts], [one.settings for one in parameters])
        time.sleep(0.001 * parameters[0].settings["max_tokens"])
        return [Out(one.settings["max_tokens"] - {missing}) for one in parameters]
"""


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a script in this process, on the tiny shape; returns its report and what it printed."""
    monkeypatch.syspath_prepend(str(TOOLS))
    monkeypatch.setattr(gc, "unfreeze", lambda: None)  # or each collection would look through all that tests have made

    def run(name: str, *arguments: str, code: int = 0) -> tuple[BenchReport, str]:
        app, path = typer.Typer(), tmp_path / "results.json"
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
        app.command()(importlib.import_module(name).main)
        common = ["--model", "tiny", "--device", "cpu", "--json", str(path), "--commit", "none"]
        done = CliRunner().invoke(app, [*common, *arguments])
        assert done.exit_code == code, done.output
        return importlib.import_module("tables").load(path), done.output

    return run


def fake_vllm(folder: Path, missing: int = 0) -> tuple[str, Path]:
    """A Python in which there is only vLLM, here a stand-in; and what that has noted."""
    log = folder / "calls.log"
    (folder / "vllm.py").write_text(ENGINE.format(log=str(log), missing=missing))
    return f"env PYTHONPATH={folder} {sys.executable} -S", log


@pytest.mark.whole
def test_latency(tool: Any) -> None:
    quick = ("--batches", "1,2", "--prompts", "8", "--new", "4", "--runs", "2")
    report, printed = tool("latency", *quick, "--contenders", "hf-eager,hf-static,compiled-llm:eager,vllm")
    assert [(one["contender"], one["batch"]) for one in report.results["latency"]] == [
        (name, batch) for name in ("hf-eager", "compiled-llm:eager") for batch in (1, 2)
    ]
    assert set(report.unavailable) == {"hf-static", "vllm"}
    assert report.command.startswith("python tools/bench/latency.py --batches 1,2")
    assert report.machine["commit"] == "none", "what is given wins over what git says"
    assert "**Prompts of 8 tokens, 4 new tokens, greedy**" in printed
    assert "of the ceiling" in printed
    assert report.machine["read_bandwidth"] > 0
    assert all(one["figures"]["of_ceiling"] > 0 for one in report.results["latency"])


@pytest.fixture
def step_bytes(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("ceiling").step_bytes


def test_bytes_of_a_step_are_weights_once_and_each_rows_keys_and_values(step_bytes: Any) -> None:
    model = tiny_qwen3()  # 2 layers, 2 kv heads of 16, vocabulary 128, hidden 64, not tied
    everything = sum(parameter.nbytes for parameter in model.parameters())
    assert step_bytes(model, 10, rows=3) == everything - 128 * 64 * 4 + 3 * 10 * 2 * 2 * 2 * 16 * 4
    tied = tiny_llama(tie_word_embeddings=True)
    assert step_bytes(tied, 10, rows=0) == sum(parameter.nbytes for parameter in tied.parameters())


def test_windows_bound_what_is_read_and_what_experts_read_is_not_known(step_bytes: Any) -> None:
    model = tiny_qwen3(use_sliding_window=True, sliding_window=4, max_window_layers=1)
    assert sorted(model.config.layer_types) == ["full_attention", "sliding_attention"]
    assert step_bytes(model, 10, rows=1) - step_bytes(model, 10, rows=0) == (10 + 4) * 2 * 2 * 16 * 4
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    experts = MixtralForCausalLM(MixtralConfig(**sizes, **heads, num_local_experts=2))
    assert step_bytes(experts, 10, rows=1) is None


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("tables")


def test_published_runs_are_shown(tables: Any, capsys: pytest.CaptureFixture[str]) -> None:
    tables.main([CHECKOUT / "results" / "d414b6d-latency-qwen3-0.6b.json"])
    printed = capsys.readouterr().out
    assert (
        "| compiled-llm:cuda-graphs | 64 | 21.8 / 22.2 | 43,541 / 43,538 | 12.98 | 41,313 / 41,233 | 48% |" in printed
    )
    assert "| compiled-llm:cuda-graphs | 4,718 | 1,137 | 2,802 | 96.8 | 19.9 | 506.0 |" in printed


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model": {}}'])
def test_a_file_without_results_is_refused(text: str, tmp_path: Path, tables: Any) -> None:
    path = tmp_path / "nothing.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="is no result of a bench"):
        tables.load(path)


SIZES = {
    "qwen3-0.6b": 0.60,
    "qwen3-8b": 8.19,
    "qwen3.5-9b": 8.95,
    "qwen3.5-35b-a3b": 34.66,
    "glm-4.7-flash": 29.94,
    "deepseek-v2-lite": 15.71,
}
"""Billions of parameters of those whose names people know."""


@pytest.mark.parametrize("name", SIZES)
def test_shapes_have_as_many_parameters_as_the_models_that_they_are_named_for(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    model = importlib.import_module("models").build(name, torch.bfloat16, torch.device("meta"))
    assert model.num_parameters() / 1e9 == pytest.approx(SIZES[name], abs=0.01)


@pytest.mark.whole
def test_quantised(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    path = tmp_path / "figures.json"
    quick = "--model tiny --layers 1 --device cpu --dtype float32 --mode eager --rows 1,2 --prompts 9 --new 2 --json"
    monkeypatch.setattr(sys, "argv", ["quantised.py", *quick.split(), str(path)])
    importlib.import_module("quantised").main()
    found = json.loads(path.read_text())
    assert {name: list(one["weights"].values()) for name, one in found.items()} == {
        "bfloat16": [],
        **{name: [7] for name in ("int4-g128", "nf4", "fp8-block", "int8")},
    }
    assert all(list(one["ms"]) == ["1", "2"] and list(one["prompt_ms"]) == ["9"] for one in found.values())
    assert "nf4-g64: compiled_llm" in capsys.readouterr().out


@pytest.mark.whole
def test_quantised_at_once(tmp_path: Path) -> None:
    run, found = _quantised(tmp_path, "--formats", "nf4-nested", "--at-once")
    assert run.returncode == 0, run.stderr
    assert [len(one["weights"]) for one in found.values()] == [0, 1]


@pytest.mark.parametrize("format", ["torchao-int8", "bitsandbytes-nf4", "bitsandbytes-int8"])
def test_quantised_by_a_library(format: str, tmp_path: Path) -> None:
    """In a process of its own: torchao sets options of Inductor."""
    if importlib.util.find_spec(package := format.split("-")[0]) is None:
        pytest.skip(f"no {package}")
    run, found = _quantised(tmp_path, "--library", format)
    assert run.returncode == 0, run.stderr
    assert {name: list(one["weights"].values()) for name, one in found.items()} == {
        "bfloat16": [],
        **{f"{format} {way}": [7] if way == "ours" else [] for way in ("ours", "library", "huggingface")},
    }
    assert run.stdout.count("ours over it, rows 1: ") == 2


@pytest.mark.whole
def test_one_that_fails_is_named_and_the_others_are_measured(tmp_path: Path) -> None:
    run, found = _quantised(tmp_path, "--formats", "no-such,nf4", "--at-once")
    assert (run.returncode, run.stderr.splitlines()[-1]) == (1, "failed: no-such")
    assert [*found["no-such"]] == ["failed"]
    assert list(found["nf4"]["weights"].values()) == [7]


def _quantised(folder: Path, *options: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    path = folder / "figures.json"
    quick = "--model tiny --layers 1 --device cpu --dtype float32 --mode eager --rows 1 --prompts 9 --new 2"
    command = [sys.executable, str(TOOLS / "quantised.py"), *quick.split(), *options, "--json", str(path)]
    run = subprocess.run(command, check=False, capture_output=True, text=True)
    return run, json.loads(path.read_text())


def test_packed_rows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(TOOLS.parent))
    monkeypatch.setattr(
        sys,
        "argv",
        ["packed_rows.py", "--device", "cpu", "--dtype", "float32", "--products", "128x128", "--rows", "1-2"],
    )
    with pytest.raises(SystemExit):
        importlib.import_module("packed_rows").main()
    assert capsys.readouterr().out.count("at worst") == 16, "each format, and bfloat16"


def test_all_of_a_random_packed_model_is_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake tensors of CUDA, so that no GPU is needed."""
    monkeypatch.syspath_prepend(str(TOOLS))
    models: Any = importlib.import_module("quantised_models")
    for name in models.FORMATS:
        with FakeTensorMode():
            model = models.random_model("tiny", name, None, torch.bfloat16, torch.device("cuda"))
        held = [tensor for module in model.modules() for tensor in tensors_of(module)]
        assert {tensor.device.type for tensor in held} == {"cuda"}, name


def test_a_random_packed_model_is_multiplied_by_our_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its layers are read as the libraries' own."""
    monkeypatch.syspath_prepend(str(TOOLS))
    models: Any = importlib.import_module("quantised_models")
    for name in models.FORMATS:
        model = models.random_model("tiny", name, None, torch.bfloat16, torch.device("cpu"))
        layers = [own for own, _ in model.named_modules() if own.endswith("_proj")]
        counted = formats_of(model)
        assert sum(counted.values()) == len(layers), (name, counted)


@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.whole), 32])
def test_guesses_are_right_independently_of_each_other(rows: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By position, and where rows ask about the same positions."""
    monkeypatch.syspath_prepend(str(TOOLS))
    accept = importlib.import_module("speculation").synthetic(0.8)
    tables = tables_of([Sampling()] * rows, vocabulary=8)
    slots, first, kept = torch.arange(rows), torch.full((rows,), 128), []
    generator = torch.Generator().manual_seed(seed)
    for _ in range(3200 // rows):
        sampled = torch.randint(8, (rows, 8), generator=generator)
        given = sampled, sampled[:, :7] ^ 1, torch.zeros(rows, dtype=torch.int32), slots, first
        tokens = accept(*given, tables.numbers[4], tables.next_token, tables.counts, tables.recent)
        kept.append((tokens >= 0).sum(1))
        first = first + kept[-1]
    accepted = torch.cat(kept)[:, None] > torch.arange(1, 8)
    for place, share in enumerate(accepted.float().mean(0).tolist(), 1):
        right = 0.8**place
        assert abs(share - right) < 4 * (right * (1 - right) / 3200) ** 0.5, (place, share, right)


@pytest.mark.whole
def test_vllm_is_asked_for_the_same_work(tool: Any, tmp_path: Path) -> None:
    python, log = fake_vllm(tmp_path)
    quick = ("--batches", "2", "--prompts", "8", "--new", "64", "--runs", "2", "--decoding", "both")
    report, _ = tool("latency", *quick, "--vllm", python, "--contenders", "vllm")
    calls = [json.loads(line) for line in log.read_text().splitlines()]
    load, runs = calls[0], [call for call in calls if call[0] == "run"]
    assert load[1]["load_format"] == "dummy"
    assert load[1]["dtype"] == "float32"
    shapes = importlib.import_module("shapes")
    options = shapes.SHAPES["tiny"].options
    assert {key: load[2][key] for key in options} == options
    assert (load[2]["architectures"], load[2]["model_type"]) == (["Qwen3ForCausalLM"], "qwen3")
    prompts = [json.dumps(call[1]) for call in runs]
    assert len(set(prompts)) == len(prompts) == 2 * 2 * (2 + 2), "no cache of prefixes may hit"
    assert [[one["max_tokens"] for one in call[2]] for call in runs] == [[1, 1], [64, 64]] * 8
    assert [call[2][0]["temperature"] for call in runs] == [0.0] * 8 + [0.8] * 8
    assert all(one["ignore_eos"] for call in runs for one in call[2])
    assert report.machine["versions"]["vllm"] == "0.0.1"
    assert len(report.results["latency"]) == 2


@pytest.mark.whole
def test_an_engine_that_comes_short_or_dies_says_why(tool: Any, tmp_path: Path) -> None:
    quick = ("--batches", "2", "--prompts", "8", "--new", "5", "--contenders", "vllm", "--vllm")
    python, _ = fake_vllm(tmp_path, missing=1)
    assert "tokens came instead of" in tool("latency", *quick, python, code=1)[1]
    dies = tmp_path / "dies.py"
    dies.write_text("import sys; sys.exit('loading\\nValueError: no CUDA for you\\nleft in peace')")
    printed = tool("latency", *quick, f"{sys.executable} {dies}", code=1)[1]
    assert "the worker ended with exit code 1: ValueError: no CUDA for you" in printed


def test_grpo_says_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.delitem(sys.modules, "grpo", raising=False)
    with pytest.raises(SystemExit, match=r"needs TRL.* and there is no module datasets"):
        importlib.import_module("grpo")


def test_offline(tool: Any, tmp_path: Path) -> None:
    python, _ = fake_vllm(tmp_path)
    quick = ("--requests", "3", "--prompts", "4-8", "--answers", "3-5", "--decoding", "greedy", "--runs", "2")
    report, _ = tool("offline", *quick, "--contenders", "compiled-llm:engine:eager,vllm", "--vllm", python)
    ours, theirs = report.results["offline"]
    assert (ours["contender"], theirs["contender"]) == ("compiled-llm:engine:eager", "vllm")
    assert ours["new_tokens"] == theirs["new_tokens"]
    assert ours["counts"]["steps"] > 0
    assert ours["counts"]["cached tokens"] == 0


def test_offline_with_pages_for_a_share_of_the_load(tool: Any, tmp_path: Path) -> None:
    python, log = fake_vllm(tmp_path)
    quick = ("--requests", "4", "--prompts", "60-60", "--answers", "5-5", "--decoding", "greedy", "--runs", "1")
    both = ("--contenders", "compiled-llm:engine:eager:unknown-lengths,vllm", "--vllm", python)
    report, _ = tool("offline", *quick, *both, "--kv-memory", "0.5x")
    ours, theirs = report.results["offline"]
    assert ours["counts"]["steps"] >= 2 * 5, "two and two"
    assert "pages for 0.5 of them" in theirs["workload"]
    loads = [call[1] for call in map(json.loads, log.read_text().splitlines()) if call[0] == "load"]
    assert [load["num_gpu_blocks_override"] for load in loads] == [4 * 5 / 2]
    assert "such as 0.75x" in tool("offline", *quick, *both, "--kv-memory", "4GiB", code=1)[1]


@pytest.mark.whole
def test_offline_also_with_shared_pages_read_once(tool: Any, tmp_path: Path) -> None:
    python, _ = fake_vllm(tmp_path)
    quick = ("--requests", "3", "--prompts", "4-8", "--answers", "5-9", "--decoding", "greedy", "--runs", "1")
    both = ("--contenders", "compiled-llm:engine:eager,vllm", "--vllm", python)
    report, _ = tool("offline", *quick, *both, "--cascade", "--system-prompt", "70")
    ours, theirs = "compiled-llm:engine:eager", "vllm"
    names = [result["contender"] for result in report.results["offline"]]
    assert names == [ours, f"{ours}:no-cascade", theirs, f"{theirs}:cascade"]
    assert len({result["new_tokens"] for result in report.results["offline"]}) == 1


@pytest.mark.whole
def test_offline_also_with_keys_and_values_in_8_bits(tool: Any, tmp_path: Path) -> None:
    python, log = fake_vllm(tmp_path)
    quick = ("--requests", "3", "--prompts", "4-8", "--answers", "5-9", "--decoding", "greedy", "--runs", "1")
    both = ("--contenders", "compiled-llm:engine:eager,vllm", "--vllm", python)
    report, _ = tool("offline", *quick, *both, "--kv-dtype", "fp8_e4m3")
    ours, theirs = "compiled-llm:engine:eager", "vllm"
    names = [result["contender"] for result in report.results["offline"]]
    assert names == [ours, f"{ours}:fp8", theirs, f"{theirs}:fp8"]
    assert len({result["new_tokens"] for result in report.results["offline"]}) == 1
    loads = [call[1] for call in map(json.loads, log.read_text().splitlines()) if call[0] == "load"]
    assert [load.get("kv_cache_dtype") for load in loads] == [None, "fp8"]


def test_the_name_of_an_engine_says_what_is_not_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    engine = importlib.import_module("engines").OurEngine
    plain, other = engine(max_step_ms=20.0), engine("compiled-llm:engine:eager:no-cascade:fp8:mixed:no-prefix-cache")
    assert (plain.name, plain._wrap, plain._options) == ("compiled-llm:engine", {}, {"max_step_ms": 20.0})
    assert other._wrap == {"mode": "eager", "cascade": False, "kv_dtype": "fp8_e4m3"}
    assert other._options == {"mixed": True, "prefix_cache": False}


@pytest.mark.parametrize("name", ["compiled-llm:engine:fast", "compiled-llm:fp8", "vllm:no-cascade", "hf-eager"])
def test_engines_that_there_are_not_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    with pytest.raises(SystemExit, match=f"--contenders: no {name}; there are compiled-llm:engine, vllm, and"):
        importlib.import_module("engines").engines_of(name, "", streams=False, cascade=False, fp8=False)


def test_the_requests_are_those_of_nano_vllms_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    offline = importlib.import_module("offline")
    lengths = offline.Lengths(100, 1024)
    asked = offline.drawn(256, lengths, lengths, 151936, 0)
    assert sum(len(one.prompt) for one in asked) == 142827, "as many as nano-vllm says"
    assert sum(one.new for one in asked) == 133966


def test_prompts_of_a_pass_begin_alike_if_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    offline = importlib.import_module("offline")
    lengths = offline.Lengths(4, 9)
    shared, others = (offline.drawn(3, lengths, lengths, 500, number, system_prompt=40) for number in (0, 1))
    plain = offline.drawn(3, lengths, lengths, 500, 0)
    assert [one.prompt[40:] for one in shared] == [one.prompt for one in plain]
    assert len({tuple(one.prompt[:40]) for one in shared}) == 1
    assert shared[0].prompt[:40] != others[0].prompt[:40], "a prefix cache would know it from the pass before"


@pytest.mark.whole
def test_online(tool: Any) -> None:
    quick = ("--rates", "4", "--seconds", "1", "--prompts", "4-8", "--answers", "3-5", "--system-prompt", "20")
    report, _ = tool("online", *quick, "--contenders", "compiled-llm:engine:eager")
    (result,) = report.results["serve"]
    assert result["load"] == "4 requests/s"
    assert result["prompts"] == "20 shared and 4 to 8"
    assert 0 < result["first_s"]["p50"] < result["end_s"]["p50"]


@pytest.mark.whole  # HuggingFace's batching fills most of a CPU's memory with zeros
def test_loops(tool: Any, tmp_path: Path) -> None:
    python, log = fake_vllm(tmp_path)
    quick = ("--prompts", "2", "--answers", "2", "--prompt", "8", "--new", "4", "--scored", "3", "--runs", "1")
    report, _ = tool("loops", *quick, "--vllm", python, "--contenders", "hf-eager,compiled-llm:eager,vllm")
    assert report.failures == []
    found = [(one["contender"], one["task"], one["tokens"]) for one in report.results["loops"]]
    rollouts = "rollouts, 2 x 2 answers of 4 tokens"
    tasks = [(f"{rollouts}, generate", 16), (f"{rollouts}, generate_batch", 16)]
    tasks += [("scoring, 3 texts, 32 in a call", 24), ("scoring, 1 texts, one in a call", 8)]
    states = [
        (f"{rows}, {asked}", 4 * int(rows[0]))
        for rows in ("1 row", "2 rows")
        for asked in ("without hidden states", "hidden states of 4 layers", "hidden states of all layers")
    ]
    tasks += [(f"generate, {task}", tokens) for task, tokens in states]
    of_engine = [*((f"engine, {task}", tokens) for task, tokens in states), ("sleep", 0), ("wake", 0)]
    assert found == [
        *(("hf-eager", *task) for task in tasks),
        *(("compiled-llm:eager", *task) for task in [*tasks, *of_engine]),
        ("vllm", rollouts, 16),
    ]
    asked = [json.loads(line) for line in log.read_text().splitlines()][-1]
    assert len({json.dumps(prompt) for prompt in asked[1]}) == 2, "each prompt is answered twice"


AROUND = (
    *("--questions=2", "--choices=2", "--shared=20", "--tokens=4", "--decisions=2", "--state=40"),
    *("--texts=35", "--least=3", "--most=20", "--runs=1", "--mode=eager"),
)


@pytest.mark.whole
def test_around(tool: Any) -> None:
    """Every tool that is there gives the same answers; lm-eval is here in the environment of trainers alone."""
    report, printed = tool("around", *AROUND)
    harness = ["HFLM", "compiled-llm:lm-eval"]
    there = importlib.util.find_spec("lm_eval") is not None
    others = ["pipeline", "compiled-llm:decide", "hf:one-by-one", "hf:batches-of-32", "compiled-llm:embed"]
    assert [one["contender"] for one in report.results["around"]] == harness * there + others
    assert max(one["differs"] for one in report.results["around"]) < 1e-4
    assert [*report.unavailable] == [] if there else harness
    assert there or "Not available: HFLM: needs lm-eval 0.4.13, and" in printed
    assert "**2 questions about a state of 40 tokens**" in printed
    assert "no speed; there are choices, decisions" in tool("around", "--what", "speed", code=2)[1]


SERVE = ("--prompts=6", "--new=4", "--requests=2", "--streams=2", "--stream-tokens=4", "--rates=4", "--seconds=1")
LOADS = ("one after the other", "2 at once", "4 requests/s")


@pytest.mark.whole
def test_serve(tool: Any) -> None:
    report, _ = tool("serve", *SERVE, "--mode", "eager", "--contenders", "compiled-llm:engine")
    found = [(one["contender"], one["load"]) for one in report.results["serve"]]
    assert found == [("compiled-llm:engine", load) for load in LOADS]


@pytest.mark.whole
def test_serve_asks_a_server_in_each_way(tool: Any) -> None:
    report, _ = tool("serve", *SERVE, "--mode", "eager", "--contenders", "compiled-llm:serve")
    found = [(one["contender"], one["load"]) for one in report.results["serve"]]
    ways = ("socket", "socket-busy-poll", "http")
    assert found == [(f"compiled-llm:{way}", load) for load in LOADS for way in ways]


def test_startup(tool: Any, tmp_path: Path) -> None:
    python, _ = fake_vllm(tmp_path)
    report, _ = tool("startup", "--prompt", "8", "--new", "4", "--runs", "1", "--contenders", "vllm", "--vllm", python)
    assert [one["cache"] for one in report.results["startup"]] == ["cold", "warm"]
    for result in report.results["startup"]:
        known = importlib.import_module("startup").STAGES
        stages = [result["stages"][stage][0] for stage in known if stage in result["stages"]]
        assert len(stages) >= 4
        assert stages == sorted(stages)


@pytest.mark.whole
@pytest.mark.parametrize(("mode", "caches"), [("eager", ["cold", "warm"]), ("compile", ["cold", "warm", "artifacts"])])
def test_startup_of_this_environment(tool: Any, mode: str, caches: list[str]) -> None:
    contender = f"compiled-llm:{mode}"
    report, _ = tool("startup", "--prompt", "8", "--new", "4", "--runs", "1", "--contenders", contender, "--spent")
    assert [one["cache"] for one in report.results["startup"]] == caches
    assert all(one["spent"]["trial forwards, until first token"]["median"] > 0 for one in report.results["startup"])


def test_the_speed_of_scripts_help(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(TOOLS / "tables.py"), "--help"], cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stderr


SMALL = ("--size", "tiny", "--mode", "eager", "--dtype", "float32", "--kv-memory", "20000 tokens")


@pytest.mark.slow
@pytest.mark.whole
def test_turns(tmp_path: Path) -> None:
    """This checkout beside itself, in two processes."""
    figures = tmp_path / "turns.json"
    short = ("--new", "4", "--requests", "2", "--seconds", "0.3", "--rounds", "2", "--what", "offline")
    files = ("--json", str(figures), "--logs", str(tmp_path))
    command = (sys.executable, str(TOOLS / "turns.py"), "--before", str(CHECKOUT), *SMALL, *short, *files)
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rates = json.loads(figures.read_text())["figures"]
    assert [len(rates[label]["offline: 2 requests, tok/s"]["rounds"]) for label in ("before", "after")] == [2, 2]
    assert "medians of all rounds" in done.stdout


def test_turns_of_what_it_does_not_measure_are_refused() -> None:
    command = (sys.executable, str(TOOLS / "turns.py"), "--before", str(CHECKOUT), *SMALL, "--what", "speed")
    wrong = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert wrong.returncode == 1
    assert "--what: no speed; there are first, generate" in wrong.stderr


@pytest.mark.slow
@pytest.mark.whole
def test_turns_over_http(tmp_path: Path) -> None:
    """This checkout's server beside itself, and what is said of one that does not start."""
    figures = tmp_path / "turns.json"
    short = ("--new", "8", "--requests", "2", "--seconds", "0.3", "--rounds", "2", "--what", "http")
    files = ("--json", str(figures), "--logs", str(tmp_path))
    command = (sys.executable, str(TOOLS / "turns.py"), "--before", str(CHECKOUT), *SMALL, *short, *files)
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    measured = json.loads(figures.read_text())["figures"]
    first = [f"first, 128 tokens, p{one} ms" for one in (50, 90, 99)]
    arriving = ["first token, p50 ms", "first token, p99 ms", "gap, p50 ms", "gap, p99 ms"]
    names = [f"http: {name}" for name in (*first, *arriving, "2 requests, tok/s")]
    for label in ("before", "after"):
        assert list(measured[label]) == names
        assert all(len(one["rounds"]) == 2 and min(one["rounds"]) >= 0 for one in measured[label].values())
        assert (tmp_path / f"turns-http-{label}.log").exists()
    refused = subprocess.run([*command, "--mode", "fast"], capture_output=True, text=True, timeout=300)
    assert refused.returncode == 1
    assert "before: the server has ended with exit code" in refused.stderr
    assert "--mode fast: choose one of 'eager'" in refused.stderr, "what its log says"
