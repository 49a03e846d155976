"""The page about the command line names all that `compiled-llm` takes, and pages use nothing else."""

from __future__ import annotations

import re
import shlex
from functools import cache

import pytest
from typer.testing import CliRunner

from compiled_llm.commands.app import app
from support.docs.pages import PAGES, rendered, short

THEIRS = {"compiled-llm lm-eval"}
"""Commands whose arguments are another program's, ``--help`` among them."""


@cache
def sections() -> dict[str, str]:
    """What the pages say of each command."""
    text = rendered("command-line.md") + "\n" + rendered("command-line-serve.md")
    parts = re.split(r"^## (compiled-llm.*)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_command_is_on_the_page() -> None:
    assert {"compiled-llm generate", "compiled-llm explain", "compiled-llm doctor"} < set(sections())
    assert {f"compiled-llm bench {name}" for name in ("latency", "serve")} < set(sections())


@pytest.mark.parametrize("command", [*sections().keys() - THEIRS])
def test_a_command_is_described_as_its_help_does(command: str) -> None:
    arguments = [*shlex.split(command)[1:], "--help"]
    shown = CliRunner().invoke(app, arguments, env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}).output
    options = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", shown)) - {"--help"}
    assert options <= set(re.findall(r"--[a-z][\w-]*", sections()[command]))
    said = sections()[command].strip().split("\n\n")[0]
    assert " ".join(said.split()) in " ".join(shown.split())


def lines() -> list[tuple[str, str]]:
    """Each line of a shell block that runs `compiled-llm`, with its page."""
    shell = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    blocks = [(short(page), block) for page in PAGES for block in shell.findall(page.read_text())]
    return [(page, line) for page, block in blocks for line in re.findall(r"compiled-llm (.+)", block)]


@pytest.mark.parametrize(("page", "line"), lines())
def test_a_page_runs_commands_that_exist(page: str, line: str) -> None:
    words = ["compiled-llm", *shlex.split(line)]
    command = max((name for name in sections() if words[: len(name.split())] == name.split()), key=len)
    assert command not in ("compiled-llm", "compiled-llm bench"), line
    for option in (word for word in words if word.startswith("-") and command not in THEIRS):
        assert re.search(rf"^\| `[^`]*{option}\b", sections()[command], re.MULTILINE), line


def test_choices_stand_beside_what_they_are_for() -> None:
    """Where a line can be broken: with them, the names of options would take most of a phone's width."""
    said = "Where the model runs; auto is CUDA if there is a device, else the CPU. One of auto, cpu, cuda."
    assert f"| `--device` | {said} | auto |" in sections()["compiled-llm explain"]
