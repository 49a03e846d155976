"""Whoever brings the options of `vllm serve` is told ours, in one line, which the documentation has, too."""

from __future__ import annotations

import functools
import re
import shlex
from typing import Any

import pytest
import typer

from compiled_llm.commands.app import app
from compiled_llm.commands.loading.source import Source
from compiled_llm.commands.serve import command
from compiled_llm.commands.serve.vllm_line import ALWAYS
from compiled_llm.commands.serve.vllm_options import VLLM_OPTIONS, instead_of
from support.commands.command_line import invoke
from support.commands.vllm_0_24 import OPTIONS
from support.docs.pages import rendered


@functools.cache
def own_options() -> frozenset[str]:
    command: typer.core.TyperGroup = typer.main.get_command(app)  # type: ignore[assignment]
    params = command.commands["serve"].params
    names = (name for param in params for name in (*param.opts, *param.secondary_opts))
    return frozenset(name for name in names if name.startswith("-"))


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("--enforce-eager", "--enforce-eager is an option of vLLM: give --mode eager"),
        ("--attention_backend=x", "--attention_backend is an option of vLLM: give --backend"),
        ("-tp 2", "-tp is an option of vLLM: a model runs on one GPU here; start a server for each GPU, with CUDA_"),
        ("--api-key secret", "--api-key is an option of vLLM: `ps` would show it to all users of this machine; "),
    ],
)
def test_an_option_of_vllm_is_answered_with_ours(typed: str, said: str) -> None:
    done = invoke("serve", "demo", *typed.split())
    assert (done.exit_code, done.stdout) == (2, "")
    line, here = done.stderr.splitlines()
    assert line.startswith(f"error: {said}")
    assert here.startswith("here the line is: compiled-llm serve demo")
    assert "secret" not in done.stderr


@pytest.mark.parametrize(
    ("typed", "refused", "here"),
    [
        (
            "Qwen/Qwen3-8B --tensor-parallel-size 1 --gpu-memory-utilization 0.9 --enable-auto-tool-choice "
            "--tool-call-parser hermes --reasoning-parser qwen3 --trust-remote-code --enable-prefix-caching "
            "--port 8001",
            ["--gpu-memory-utilization", "--tool-call-parser", "--reasoning-parser", "--trust-remote-code"],
            "Qwen/Qwen3-8B --kv-memory 0.9 --port 8001",
        ),
        ("--enforce_eager a -tp=4 --max-num-seqs 2", ["--enforce_eager", "-tp"], "--mode eager a --max-num-seqs 2"),
        (
            "--api-key a b --hf-token c --seed -1 --kv-cache-dtype fp8",
            ["--api-key", "--hf-token", "--seed", "--kv-cache-dtype"],
            "--kv-dtype fp8_e4m3",
        ),
        ("'my model' --swap-space 4 --system 'a b'", ["--swap-space"], "'my model' --system 'a b'"),
    ],
)
def test_all_options_of_vllm_are_refused_at_once_with_the_line_to_paste(
    typed: str, refused: list[str], here: str
) -> None:
    done = invoke("serve", *shlex.split(typed))
    assert done.exit_code == 2
    *errors, line = done.stderr.splitlines()
    assert [error.split()[1] for error in errors] == refused
    assert all(error.startswith("error: ") for error in errors)
    assert line == f"here the line is: compiled-llm serve {here}"


@pytest.mark.parametrize("typed", ["", "--enable-prefix-caching", "-tp 1 --block-size=16 --async_scheduling"])
def test_an_option_of_vllm_that_says_what_always_holds_is_taken(typed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr(command, "locate", lambda *given: Source(given[0], given[0], is_local=False))
    monkeypatch.setattr(command, "run_with_api_server", lambda *given: started.append(given))
    for quiet in ([], ["--quiet"]):
        done = invoke("serve", "demo", *typed.split(), *quiet)
        assert done.exit_code == 0, done.stderr
        named = ", ".join(filter(None, re.split(r" (?=-)", typed.replace("=", " "))))
        warned = f"compiled_llm: options of vLLM that say what always holds: {named}\n"
        assert done.stderr == (warned if typed and not quiet else "")
    assert len(started) == 2


def test_what_always_holds_is_an_option_of_vllm() -> None:
    assert all(instead_of(name) is not None for names in ALWAYS for name in names.split())


def test_the_table_names_options_that_exist_and_none_that_serve_has() -> None:
    names = [name for several in VLLM_OPTIONS for name in several.split()]
    assert len(names) == len(set(names))
    assert not set(names) & own_options()
    commands_of_others = {"--revision"}  # of `hf download`
    for sentence in VLLM_OPTIONS.values():
        assert set(re.findall(r"--[a-z][\w-]*", sentence)) <= own_options() | commands_of_others, sentence


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_of_vllm_is_ours_or_is_answered(option: str) -> None:
    assert (option in own_options()) != (instead_of(option) is not None)


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("Qwen/Qwen2.5-1.5B-Instruct", None),
        ("--model Qwen/Qwen2.5-1.5B-Instruct", None),
        ("Qwen/Qwen2.5-1.5B-Instruct --host 127.0.0.1 --port 8000 --served-model-name a --max-model-len 4096", None),
        ("NousResearch/Meta-Llama-3-8B-Instruct --dtype auto", None),
        ("Qwen/Qwen3-8B --dtype half --max-num-seqs 16 --max_model_len 4096", None),
        ("NousResearch/Meta-Llama-3-8B-Instruct --dtype auto --api-key token-abc123", "--api-key is"),
        ("Qwen/Qwen3-8B --chat-template ./none.jinja", "--chat-template "),
        ("Qwen/Qwen3-8B --reasoning-parser qwen3", "--reasoning-parser is"),
        ("Qwen/Qwen3-8B --enable-auto-tool-choice --tool-call-parser hermes", "--tool-call-parser is"),
        ("Qwen/Qwen3-8B --tensor-parallel-size 4", "--tensor-parallel-size is"),
        ("Qwen/Qwen3-8B -tp 4", "-tp is"),
        ("Qwen/Qwen3-8B --gpu-memory-utilization 0.9", "--gpu-memory-utilization is"),
        ("Qwen/Qwen3-8B --trust-remote-code", "--trust-remote-code is"),
        ("Qwen/Qwen3-8B --enable-lora --lora-modules sql-lora=path", "--enable-lora is"),
        ("Qwen/Qwen3-8B --quantization awq", "--quantization is"),
        ("Qwen/Qwen3-8B --generation-config vllm", "--generation-config is"),
        ("Qwen/Qwen3-8B --no-enable-log-requests", "--no-enable-log-requests is"),
        ("Qwen/Qwen2-VL-7B-Instruct --limit-mm-per-prompt.image 2", "--limit-mm-per-prompt.image is"),
    ],
)
def test_lines_of_vllms_documentation_start_or_say_what_to_write(
    line: str, answer: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(command, "locate", lambda *given: Source(given[0], given[0], is_local=False))
    monkeypatch.setattr(command, "run_with_api_server", lambda *given: started.append(given))
    if answer is not None and "--chat-template" in answer:
        monkeypatch.undo()
    done = invoke("serve", *line.split())
    assert (done.exit_code, len(started)) == ((0, 1) if answer is None else (2, 0)), done.stderr
    if answer is not None:
        said, *_ = done.stderr.splitlines()
        assert said.startswith(f"error: {answer}")


def test_the_page_says_what_the_error_says() -> None:
    page = rendered("../how-to/from-vllm.md")
    for names, sentence in VLLM_OPTIONS.items():
        assert f"| {', '.join(f'`{name}`' for name in names.split())} | {sentence} |" in page
    same = re.search(r"## Options of `vllm serve`\n\n(.+) mean the same here", page)
    assert same is not None
    assert set(re.findall(r"`(--[\w-]+)`", same[1])) == (own_options() & set(OPTIONS)) - {"--uds"}
