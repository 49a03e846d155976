"""The command line, called in this process; and what it should say, by HuggingFace."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from unittest.mock import patch

from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.main import get_command
from typer.testing import CliRunner, Result

from compiled_llm.commands.app import app

commands = cache(get_command)
"""Typer's runner makes all commands anew for each call, which takes longer than most calls."""


def invoke(*arguments: str, stdin: str | bytes | None = None) -> Result:
    """What a command writes to a terminal of 300 columns, or to pipes."""
    with patch("typer.testing._get_command", commands):
        return CliRunner().invoke(app, arguments, input=stdin, env={"COLUMNS": "300", "NO_COLOR": "1"})


@cache
def greedy(folder: Path, prompt: str, max_new_tokens: int) -> tuple[str, str]:
    """The prompt as the tokenizer reads it, and HuggingFace's own continuation."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(prompt, return_tensors="pt")
    tokens = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)[0]
    length = inputs["input_ids"].shape[1]
    return tuple(tokenizer.decode(part, skip_special_tokens=True) for part in (tokens[:length], tokens[length:]))  # type: ignore[return-value]
