"""`tools/bench/recurrent.py`: cases, and a run on the CPU with tiny sizes."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from support.imports import CHECKOUT

TOOLS = CHECKOUT / "tools" / "bench"
pytestmark = pytest.mark.skipif(not TOOLS.is_dir(), reason="no checkout")


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """Runs it in this process; returns what it printed, and its JSON."""
    recurrent = importlib.import_module("recurrent")
    monkeypatch.setattr(importlib.import_module("common"), "read_bandwidth", lambda *_: 1e10)

    def run(*arguments: str) -> tuple[Any, dict[str, Any]]:
        app, file = typer.Typer(), tmp_path / "recurrent.json"
        app.command()(recurrent.main)
        monkeypatch.setattr(sys, "argv", ["recurrent.py", *arguments])
        common = ["--size", "tiny", "--device", "cpu", "--json", str(file), "--commit", "none"]
        done = CliRunner().invoke(app, [*common, *arguments])
        return done, json.loads(file.read_text()) if file.exists() else {}

    return run


def test_the_script_measures_all_that_runs_on_a_cpu(script: Any) -> None:
    done, found = script("--quick", "--check")
    assert done.exit_code == 0, done.output + str(found.get("failures"))
    results = found["recurrent"]
    assert len(results) == 3 * (2 * 6 + 3 * 3), "cases, and contenders of delta rules and scans"
    timed = {(one["layer"], one["case"]): one for one in results if one["figures"] and one["contender"] == "ours"}
    assert len(timed) == 3 * 5
    assert {one["contender"] for one in results if one["figures"]} == {"ours", "huggingface:torch"}
    assert all(one["off"] < 1e-2 for one in results if one["figures"])
    one = timed["Qwen3.5", "2 x 1"]
    each = (2 * 2 * 16 + 2 * 4 * 16 + 4) * 4 + 4 * 4
    assert one["nbytes"] == 2 * each + 2 * 2 * 4 * 16 * 16 * 4
    assert one["figures"]["of_bandwidth"] == pytest.approx(one["nbytes"] / one["figures"]["us"] / 1e4)
    assert "**Kimi Linear, gated_delta_rule**" in done.output
    assert done.output.count("needs CUDA") == len(results) - len([one for one in results if one["figures"]])


def test_what_differs_ends_in_an_error(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    contenders = importlib.import_module("recurrent_ops.contenders")
    wrong = contenders.Contender("wrong", contenders.DELTA, lambda inputs: lambda number: inputs.args[0].value * 2)
    monkeypatch.setattr(contenders, "CONTENDERS", (wrong,))
    done, found = script("--check", "--layers", "kimi", "--only", "decode")
    assert done.exit_code == 1
    assert found["failures"] == ["Kimi Linear, 2 x 1: wrong differs from the op on the CPU"]


def test_a_contender_that_fails_is_a_row(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    contenders = importlib.import_module("recurrent_ops.contenders")

    def raises(_: object) -> Any:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(contenders, "CONTENDERS", (contenders.Contender("broken", contenders.BOTH, raises),))
    done, found = script("--layers", "bamba", "--only", "decode")
    assert done.exit_code == 0
    assert [one["remark"] for one in found["recurrent"]] == ["RuntimeError: no kernel"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "gpt"], "--layers: no gpt; there are qwen3.5, kimi"),
        (["--only", "speed"], "--only: no speed; there are prefill, decode"),
        (["--contenders", "nosuch"], "--contenders: no nosuch; there are ours, ours:chunks"),
        (["--size", "small"], "--size small: there are full, tiny"),
    ],
)
def test_wrong_arguments_are_refused(script: Any, arguments: list[str], message: str) -> None:
    done, found = script(*arguments)
    assert done.exit_code != 0
    assert message in done.output + str(done.exception)
    assert found == {}


def test_full_sizes_are_those_of_the_configs() -> None:
    from transformers import BambaConfig, KimiLinearConfig, NemotronHConfig
    from transformers.models.qwen3_5 import Qwen3_5TextConfig

    layers = importlib.import_module("recurrent_ops.cases").LAYERS
    qwen, kimi, nemotron, bamba = Qwen3_5TextConfig(), KimiLinearConfig(), NemotronHConfig(), BambaConfig()
    of_qwen = qwen.linear_num_value_heads, qwen.linear_key_head_dim, qwen.linear_value_head_dim
    assert layers["qwen3.5"][2:] == (*of_qwen, qwen.linear_num_key_heads, False)
    assert layers["kimi"][2:4] == (kimi.linear_num_heads, kimi.linear_head_dim)
    of_nemotron = nemotron.mamba_num_heads, nemotron.mamba_head_dim, nemotron.ssm_state_size, nemotron.n_groups
    assert layers["nemotron-h"][2:6] == of_nemotron
    assert layers["bamba"][2:6] == (bamba.mamba_n_heads, bamba.mamba_d_head, bamba.mamba_d_state, bamba.mamba_n_groups)


def test_fits_have_more_contenders() -> None:
    contenders = importlib.import_module("recurrent_ops.contenders")
    more = {one.name for one in contenders.named("", fit=True)} - {one.name for one in contenders.CONTENDERS}
    assert len(more) == len(contenders.TILINGS)
    assert "ours:chunks:32x2x4" in more
    inputs = importlib.import_module("recurrent_ops.cases")
    case, layer = inputs.SMALL[0], inputs.TINY["qwen3.5"]
    made = inputs.Inputs(layer, case, torch.device("cpu"), torch.float32)
    assert contenders.named("ours:chunks:32x2x4", fit=True)[0].prepare(made) == "Triton needs CUDA"
