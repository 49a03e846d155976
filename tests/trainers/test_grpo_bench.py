"""`tools/bench/grpo.py` on a tiny model: steps that it times, and answers that never end early."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from compiled_llm.commands.bench.report import BenchReport
from support.docs.pages import CHECKOUT, figures

TOOLS = CHECKOUT / "tools" / "bench"
QUICK = ("--prompts=2", "--answers=2", "--prompt=8", "--new=8", "--micro=2", "--steps=2")
WAYS = (
    "hf-generate",
    "compiled-llm:generate:eager",
    "compiled-llm:generate-batch:eager",
    "compiled-llm:engine:eager",
    "compiled-llm:sample-with:eager",
)
pytestmark = pytest.mark.skipif(not TOOLS.is_dir(), reason="no checkout")


@pytest.fixture
def grpo(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("grpo")


@pytest.fixture
def script(grpo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs it in this process; returns its exit code, what it printed, and its report."""

    def run(*arguments: str) -> tuple[int, str, BenchReport | None]:
        app, path = typer.Typer(), tmp_path / "grpo.json"
        monkeypatch.setattr(sys, "argv", ["grpo.py", *arguments])
        app.command()(grpo.main)
        common = ["--model", "tiny", "--device", "cpu", "--json", str(path), "--commit", "none"]
        done = CliRunner().invoke(app, [*common, *arguments])
        return done.exit_code, done.output, importlib.import_module("tables").load(path) if path.exists() else None

    return run


def test_each_way_is_timed_in_steps_and_their_parts(script):
    # Without HuggingFace's batching, which fills most of a CPU's memory with zeros.
    code, printed, report = script(*QUICK, "--logprobs", "--contenders", ",".join(WAYS))
    assert code == 0, printed
    results = report.results["grpo"]
    assert [result["contender"] for result in results] == list(WAYS)
    for result in results:
        assert result["new_tokens"] == 2 * 2 * 8
        assert len(result["steps"]) == 1 + 2
        assert all(step["rollout"] < step["step"] for step in result["steps"])
        assert result["figures"]["tokens_per_s"]["runs"] == 2
        naps = {"wake", "sleep"} & set(result["figures"])
        assert len(naps) == (2 if "engine" in result["contender"] else 0)
    shown = "\n".join(figures()._tables(results, *figures().TABLES["grpo"]))
    for table in (printed, shown):
        assert "**Steps of GRPO, 2 prompts of 8 tokens x 2 answers of 8, micro batches of 2**" in table
        assert "| rest, s |" in table


def test_tools_are_called_between_turns(script):
    ways = ("compiled-llm:generate:eager", "compiled-llm:engine:eager", "compiled-llm:sample-with:eager")
    code, printed, report = script(*QUICK, "--tools=4", "--contenders", ",".join(ways))
    assert code == 0, printed
    results = report.results["grpo"]
    assert [result["contender"] for result in results] == [ways[0], ways[2]]
    assert {result["new_tokens"] for result in results} == {2 * 2 * 8 * 4}, "each turn's, without what the tool says"
    assert "a rollout_func has the first turn alone" in report.unavailable[ways[1]]
    assert "x 2 answers of 4 turns of 8, a tool's 64 between them" in printed
    assert report.machine["versions"]["trl"]


def test_micro_batches_divide_the_answers(script):
    code, printed, report = script(*QUICK, "--micro=3")
    assert code == 2
    assert "--micro: 3 does not divide 4 answers" in printed
    assert report is None


def test_no_answer_can_end_early_and_a_letter_is_a_token(grpo):
    tokenizer = grpo.tokenizer_of(512)
    assert tokenizer.eos_token_id == 512, "which the model has not"
    asked = grpo.Grpo(prompts=2, answers=2, prompt=8, new=8, micro=2)
    texts = list(asked.texts(3)["prompt"])
    assert len(set(texts)) == 3 * 2
    assert {len(ids) for ids in tokenizer(texts)["input_ids"]} == {8}
