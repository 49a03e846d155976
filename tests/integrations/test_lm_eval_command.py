"""`compiled-llm lm-eval` hands all to lm-eval's own command, which then knows our model; lm-eval need not be here.

`test_lm_eval_model.py` has the model itself, with lm-eval.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from compiled_llm.commands.app import app
from compiled_llm.commands.lm_eval import MODEL, NAME
from support.imports import CHECKOUT, name_of, sources


class Registry(dict[str, str]):
    def register(self, name: str, target: str) -> None:
        self[name] = target


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> tuple[Registry, list[list[str]]]:
    """What is used of lm-eval, in place of it: its registry, and the arguments that its command was given."""
    registry, given = Registry(), []
    parts: dict[str, dict[str, Any]] = {
        "lm_eval": {},
        "lm_eval.models": {},
        "lm_eval.api": {},
        "lm_eval.api.registry": {"model_registry": registry},
        "lm_eval.__main__": {"cli_evaluate": lambda: given.append([*sys.argv])},
    }
    for name, names in parts.items():
        module = ModuleType(name)
        vars(module).update(names, __path__=[])
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(sys, "argv", ["compiled-llm"])
    return registry, given


@pytest.mark.parametrize(
    "arguments", [["--help"], ["run", "--model", "compiled_llm", "--tasks", "arc"], ["ls", "tasks"]]
)
def test_arguments_are_lm_evals(arguments: list[str], harness: tuple[Registry, list[list[str]]]) -> None:
    registry, given = harness
    done = CliRunner().invoke(app, ["lm-eval", *arguments], prog_name="compiled-llm")
    assert done.exit_code == 0, done.output
    assert given == [["compiled-llm lm-eval", *arguments]]
    assert registry == {NAME: MODEL}


def test_lm_evals_own_entry_for_us_stays(harness: tuple[Registry, list[list[str]]]) -> None:
    registry, _ = harness
    registry[NAME] = "theirs"
    assert CliRunner().invoke(app, ["lm-eval", "ls"]).exit_code == 0
    assert registry == {NAME: "theirs"}


@pytest.mark.parametrize("missing", ["lm_eval", "lm_eval.api.registry"])
def test_a_missing_or_old_lm_eval_is_named_with_the_command(
    missing: str, harness: tuple[Registry, list[list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)  # type: ignore[arg-type]
    done = CliRunner().invoke(app, ["lm-eval", "ls"])
    assert done.exit_code == 2
    assert "lm-eval 0.4.13 or newer is needed" in done.output
    assert "pip install 'lm-eval[hf]>=0.4.13'" in done.output


def test_the_model_is_where_lm_eval_is_told() -> None:
    module, _, name = MODEL.partition(":")
    paths = {name_of(path, CHECKOUT): path for path in sources().values()}
    assert f"class {name}(HFLM)" in paths[module].read_text()
    patch = (CHECKOUT / "compiled_llm/integrations/lm_eval/lm_eval.patch").read_text()
    assert f'+    "{NAME}": "{MODEL}",\n' in patch


def test_nothing_of_lm_eval_is_imported_before_it_is_used() -> None:
    before = set(sys.modules)
    import_module("compiled_llm.commands.app")
    assert not any(name.partition(".")[0] == "lm_eval" for name in set(sys.modules) - before)
