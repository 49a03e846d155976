"""The scripts of `examples/` run to their end, each as a user starts it, with a tiny model in place of the demo's.

Models run uncompiled, in this process.
"""

from __future__ import annotations

import ast
import io
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from fastapi.testclient import TestClient

import compiled_llm
from support.docs.tiny_chat import loaded, tiny_chat_model
from support.imports import CHECKOUT
from support.server.scripted import Script, speaking_server, tool_tokenizer

EXAMPLES = sorted((CHECKOUT / "examples").glob("*.py"))
Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_chat_model(tmp_path_factory.mktemp("examples") / "tiny")


@pytest.fixture
def run(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a script of this name with these arguments, as `python examples/NAME.py` does; returns its names."""
    wrap = compiled_llm.wrap
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(compiled_llm, "demo", lambda: loaded(tiny_folder))
    monkeypatch.setattr(
        *(compiled_llm, "wrap"), lambda model, **options: wrap(model, mode="eager", kv_memory="4000 tokens", **options)
    )
    monkeypatch.chdir(tmp_path)

    def script(name: str, *arguments: str, run_name: str = "__main__") -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        return runpy.run_path(str(CHECKOUT / "examples" / f"{name}.py"), run_name=run_name)

    return script


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda script: script.stem)
def test_an_example_is_short_and_says_how_it_is_started(script: Path) -> None:
    text = script.read_text()
    said = ast.get_docstring(ast.parse(text)) or ""
    assert len(text.splitlines()) <= 60
    assert f"examples/{script.name}" in said or f"{script.stem}:app" in said
    assert "pip install" in said
    assert f"test_{script.stem}" in {name.partition("_example")[0] for name in globals() if name.startswith("test_")}
    assert script.name in (CHECKOUT / "README.md").read_text() + (CHECKOUT / "examples" / "README.md").read_text()


def test_chat_example(run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\nAnd now?\n\n"))
    names = run("chat")
    assert [message["role"] for message in names["messages"]] == ["user", "assistant"] * 2
    assert names["messages"][1]["content"][:20] in capsys.readouterr().out
    assert names["model"].compiled.stats().generate_calls == {"fast loop": 2}


def test_batch_example(run: Run, tmp_path: Path) -> None:
    asked = [f"What is {number} plus {number}?" for number in range(5)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in asked))
    run("batch", "prompts.jsonl", "answers.jsonl")
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [answer["prompt"] for answer in answers] == asked
    assert {answer["ended"] for answer in answers} == {"length"}


def test_stream_to_page_example(run: Run) -> None:
    with TestClient(run("stream_to_page", run_name="stream_to_page")["app"]) as client:
        assert 'fetch("answer?question="' in client.get("/").text
        with client.stream("GET", "/answer", params={"question": "Hello"}) as answer:
            assert len([*answer.iter_text()]) > 1
            assert answer.headers["content-type"] == "text/plain; charset=utf-8"


CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 17, "b": 23}}\n</tool_call>'


def test_tools_example(run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    client = openai.OpenAI
    with speaking_server(tool_tokenizer()) as (script, api_server):
        monkeypatch.setattr(openai, "OpenAI", lambda base_url, **o: client(base_url=f"{api_server.url}/v1", **o))
        texts = iter([CALL, "It is 391."])

        def answer(asked: Any) -> Any:
            script.text = next(texts)
            return Script.answer(script, asked)

        monkeypatch.setattr(script, "answer", answer)
        run("tools", "What is 17 times 23?")
        assert '"a": 17' in script.prompt
        assert "391" in script.prompt  # what the function has returned
    assert "= 391" in (said := capsys.readouterr().out)
    assert said.splitlines()[-1] == "It is 391."


def test_structured_example(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    names = run("structured")
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == len(names["TEXTS"])
    assert all("kind=" in line and "urgent=" in line for line in shown)


def test_lora_example(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run("lora")
    first, second, again, none = (line.partition(": ")[2] for line in capsys.readouterr().out.splitlines()[:4])
    assert first == again
    assert len({first, second, none}) == 3


def test_embeddings_example(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    names = run("embeddings", "How do I get my money back?")
    scores, texts = zip(*(line.split("  ") for line in capsys.readouterr().out.splitlines()), strict=True)
    assert sorted(texts) == sorted(names["TEXTS"])
    assert list(scores) == sorted(scores, key=float, reverse=True)
    assert names["vectors"].shape[0] == len(texts)


def test_decisions_example(run: Run, tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers.decision", reason="decisions need transformers 5.24")
    letters = {"labels": {"noul": ["Y", "N"]}}  # to the tiny tokenizer a letter is a token, and no word is one
    (tiny_folder / "decision.json").write_text(json.dumps(letters))
    names = run("decisions")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 * len(names["TEXTS"])
    for answered, tokens in zip(lines[1::4], lines[3::4], strict=True):
        assert answered.split()[0] in names["QUESTIONS"]["team"]["criteria"]
        there, _, asked, *_ = tokens.split()
        assert 0 < int(there) < int(asked)


def test_evaluate_example(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    run("evaluate")
    right, there = capsys.readouterr().out.splitlines()[-2:]
    assert right.startswith("right: ")
    assert int(there.rpartition(" ")[2]) > 0


def test_grpo_example(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("trl", reason="TRL is not installed")
    names = run("grpo")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("reward ")]
    assert len(lines) == names["STEPS"]
    assert all(line.endswith("ratio 1.0000") for line in lines)
