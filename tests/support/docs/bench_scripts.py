"""Scripts of `tools/bench`, run by tests in tiny sizes."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import typer
from typer.testing import CliRunner

from support.docs.pages import CHECKOUT


class TinyRun(NamedTuple):
    """A script, what it has printed, and the results that it has written of its own kind."""

    module: ModuleType
    output: str
    results: list[dict[str, Any]]

    def refusal(self, *arguments: str) -> str:
        """Return what the script says of arguments that it refuses."""
        refused = CliRunner().invoke(_app(self.module), [*arguments])
        return str(refused.exception or refused.output)


def bench_script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(CHECKOUT / "tools" / "bench"))
    return importlib.import_module(name)


def tiny_run(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> TinyRun:
    """Run the script `name` with `--size tiny` on the CPU."""
    module, file = bench_script(name, monkeypatch), folder / f"{name}.json"
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    common = ["--size", "tiny", "--device", "cpu", "--json", str(file), "--commit", "none"]
    done = CliRunner().invoke(_app(module), common)
    assert done.exit_code == 0, done.output
    return TinyRun(module, done.output, json.loads(file.read_text())[name])


def _app(module: ModuleType) -> typer.Typer:
    app = typer.Typer()
    app.command()(module.main)
    return app
