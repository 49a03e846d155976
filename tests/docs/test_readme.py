"""What README shows under its code and its command is what they print, with the weights of the demo model."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import compiled_llm
from compiled_llm.commands.app import app
from support.docs.pages import CHECKOUT, HUB_ID, PAGES, blocks_of, run
from support.imports import sources

README = CHECKOUT / "README.md"
SHOWN = re.findall(r"^```text\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_readmes_code_prints_what_it_shows(demo_model_dir: Path, tmp_path: Path, monkeypatch) -> None:
    """Where there is no hub: from_pretrained prefers a folder of that name."""
    folder = tmp_path / HUB_ID
    folder.parent.mkdir()
    folder.symlink_to(demo_model_dir)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    wrap = compiled_llm.wrap
    monkeypatch.setattr(compiled_llm, "wrap", lambda model: wrap(model, mode="eager"))
    (block,) = blocks_of(README)
    assert run(block, README, {"__name__": "__main__"}) == SHOWN[0].splitlines()


@pytest.mark.slow
def test_readmes_command_prints_what_it_shows(demo_model_dir: Path) -> None:
    command, served = re.findall(r"^compiled-llm (.+)$", README.read_text(), re.MULTILINE)
    done = CliRunner().invoke(app, [*shlex.split(command), "--mode", "eager", "--device", "cpu"])
    assert (done.exit_code, done.stdout) == (0, SHOWN[1])
    assert served == "serve demo"  # tests/server/api_server/openai/test_acceptance.py does so


def test_readmes_commands_can_be_pasted_and_their_needs_are_said() -> None:
    text = README.read_text()
    for commands in re.findall(r"^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        assert not re.search(r"<\w", commands), "bash takes a placeholder for a file"
    needs = dict(re.findall(r"(transformers|PyTorch) ([\d.]+) or newer", text))
    bounds = dict(re.findall(r'"(torch|transformers)>=([\d.]+),', (CHECKOUT / "pyproject.toml").read_text()))
    assert needs == {"transformers": bounds["transformers"], "PyTorch": bounds["torch"]}


def test_a_server_is_installed_with_structured_outputs_as_readme_promises() -> None:
    extras = dict(re.findall(r"^(\w+) = \[(.+)\]$", (CHECKOUT / "pyproject.toml").read_text(), re.MULTILINE))
    (taken,) = re.findall(r"compiled-llm\[([\w,]+)\]", extras["server"])
    assert "xgrammar" in "".join([extras["server"], *(extras[name] for name in taken.split(","))])
    for name in ("deploy/Dockerfile", "docs/how-to/deploy.md", "README.md"):
        assert re.search(r"\[[\w,]*\bserver\]", (CHECKOUT / name).read_text()), name


def test_nobody_is_told_to_install_what_no_index_has() -> None:
    """Once the package is published, the advice can name it."""
    for file in (*PAGES, CHECKOUT / "BENCHMARKS.md", CHECKOUT / "CONTRIBUTING.md", *sources().values()):
        assert not re.search(r"pip install .*compiled-llm\[|install compiled-llm", file.read_text()), file
