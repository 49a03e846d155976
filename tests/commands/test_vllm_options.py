"""Whoever brings the options of `vllm serve` is told ours, in one line, which the documentation has, too."""

from __future__ import annotations

import re

import pytest
import typer

from compiled_llm.commands.app import app
from compiled_llm.commands.serve.vllm_options import VLLM_OPTIONS
from support.commands.command_line import invoke
from support.docs.pages import rendered


def own_options() -> set[str]:
    command: typer.core.TyperGroup = typer.main.get_command(app)  # type: ignore[assignment]
    params = command.commands["serve"].params
    return {name for param in params for name in (*param.opts, *param.secondary_opts) if name.startswith("-")}


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("--enforce-eager", "--enforce-eager is an option of vLLM: give --mode eager"),
        ("--attention_backend=x", "--attention_backend is an option of vLLM: give --backend"),
        ("--model demo", "--model is an option of vLLM: give the model without it, as in `compiled-llm serve demo`"),
        ("-tp 2", "-tp is an option of vLLM: a model runs on one GPU here; start a server for each GPU, with CUDA_"),
        ("--api-key secret", "--api-key is an option of vLLM: `ps` would show it to all users of this machine; "),
    ],
)
def test_an_option_of_vllm_is_answered_with_ours(typed: str, said: str) -> None:
    done = invoke("serve", "demo", *typed.split())
    assert (done.exit_code, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {said}")
    assert "secret" not in line


def test_the_table_names_options_that_exist_and_none_that_serve_has() -> None:
    names = [name for several in VLLM_OPTIONS for name in several]
    assert len(names) == len(set(names))
    assert not set(names) & own_options()
    commands_of_others = {"--revision"}  # of `hf download`
    for sentence in VLLM_OPTIONS.values():
        assert set(re.findall(r"--[a-z][\w-]*", sentence)) <= own_options() | commands_of_others, sentence


def test_the_page_says_what_the_error_says() -> None:
    page = rendered("../how-to/http.md")
    for names, sentence in VLLM_OPTIONS.items():
        assert f"| {', '.join(f'`{name}`' for name in names)} | {sentence} |" in page
    same = re.search(r"## Options of `vllm serve`\n\n(.+) mean the same here", page)
    assert same is not None
    assert set(re.findall(r"`(--[\w-]+)`", same[1])) <= own_options()
