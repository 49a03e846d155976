"""Contenders in processes of their own: other engines, and how long a start takes."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_llm.commands.bench import models, startup
from compiled_llm.commands.bench.contender import Setup
from compiled_llm.commands.bench.local import local_worker
from compiled_llm.commands.bench.report import Report
from compiled_llm.commands.bench.workload import SAMPLING
from support.bench import invoke
from support.foreign_folder import ForeignFolder

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


def test_worker_imports_nothing_of_the_current_folder(foreign: ForeignFolder) -> None:
    """One that ends at its job, which is none."""
    with local_worker(Setup("tiny", torch.device("cpu"), torch.float32, [], print), "hf-eager") as (*command, _):
        done = subprocess.run([*command, "no job"], cwd=foreign.path, capture_output=True, text=True)
    assert "JSONDecodeError" in done.stderr
    assert foreign.executed() == ""


@pytest.mark.slow
def test_startup_of_this_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(startup.CACHES, "PYTHONPYCACHEPREFIX")  # without byte code it would take twice as long
    path = tmp_path / "results.json"
    arguments = ("--model", "tiny", "--prompt", "8", "--new", "4", "--runs", "0", "--json", str(path))
    done = invoke("startup", *arguments, "--contenders", "compiled-llm:eager")
    assert done.exit_code == 0, done.output
    results = [(result.contender, result.cache) for result in Report.load(path).startup]
    assert results == [("compiled-llm:eager", "cold")]


@pytest.mark.whole
def test_starts_with_artifacts_are_timed(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    arguments = ("--model", "tiny", "--prompt", "8", "--new", "4", "--runs", "1", "--json", str(path))
    done = invoke("startup", *arguments, "--contenders", "ours", "--device", "cpu")
    assert done.exit_code == 0, done.output
    startups = Report.load(path).startup
    assert [(result.cache, set(result.stages)) for result in startups] == [
        (kind, set(startup.STAGES)) for kind in ("cold", "warm", "artifacts")
    ]
