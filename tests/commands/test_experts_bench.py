"""`tools/bench/experts.py`: its contenders on the CPU, what it counts, its tables."""

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

from support.docs.pages import CHECKOUT

CPU = torch.device("cpu")


@pytest.fixture
def experts(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(CHECKOUT / "tools" / "bench"))
    return importlib.import_module("experts")


@pytest.fixture
def script(experts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """Runs it in this process on the tiny shape; returns what it printed, and its JSON."""
    monkeypatch.setattr(importlib.import_module("common"), "read_bandwidth", lambda *_: 1e10)

    def run(*arguments: str) -> tuple[Any, dict[str, Any]]:
        app, file = typer.Typer(), tmp_path / "experts.json"
        app.command()(experts.main)
        monkeypatch.setattr(sys, "argv", ["experts.py", *arguments])
        common = ["--size", "tiny", "--device", "cpu", "--json", str(file), "--commit", "none"]
        done = CliRunner().invoke(app, [*common, *arguments])
        return done, json.loads(file.read_text()) if file.exists() else {}

    return run


def test_all_contenders_give_the_same_and_are_timed(script: Any) -> None:
    done, found = script("--rows", "1,8,64,300", "--check")
    assert done.exit_code == 0, done.output
    results = found["experts"]
    assert [(one["rows"], one["contender"]) for one in results] == [
        (rows, name) for rows in (1, 8, 64, 300) for name in ("fused_experts", "batched_mm", "grouped_mm", "eager")
    ]
    for one in results:
        assert one["remark"] == ""
        assert one["off"] < 1e-4
        assert one["figures"]["us"] > 0
        assert one["figures"]["of_bandwidth"] == pytest.approx(one["nbytes"] / one["figures"]["us"] * 1e6 / 1e10)
    of_an_expert = 4 * (2 * 32 * 64 + 64 * 32)
    assert [results[4 * number]["nbytes"] for number in (0, 3)] == [4 * of_an_expert, 16 * of_an_expert]
    assert results[0]["flops"] == 2 * 4 * of_an_expert // 4
    assert "**4 of 16 experts**" in done.output


def test_the_bytes_are_those_of_experts_that_a_launch_chose(experts: Any) -> None:
    config = experts.Qwen3_5MoeTextConfig(**experts.SIZES["tiny"])
    layers = experts.Layers(config, 2, CPU, torch.float32)
    counts = [len({*ids.flatten().tolist()}) for ids, _ in layers.choices]
    assert layers.nbytes == layers.of_an_expert * sum(counts) // len(counts)
    assert len({tuple(ids.flatten().tolist()) for ids, _ in layers.choices}) > 10, "launches choose others"
    assert layers.layers[0].gate_up_proj.data_ptr() != layers.layers[1].gate_up_proj.data_ptr()


def test_what_fails_or_differs_is_said(script: Any, experts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*_: object) -> Any:
        raise RuntimeError("no kernel\nfor this")

    monkeypatch.setattr(experts, "experts_forward", raises)
    done, found = script("--rows", "2", "--contenders", "fused_experts,eager")
    assert done.exit_code == 0
    assert [one["remark"] for one in found["experts"]] == ["RuntimeError: no kernel", ""]
    monkeypatch.setattr(experts, "experts_forward", lambda layer, states, ids, weights: 2 * states)
    done, found = script("--rows", "2", "--contenders", "fused_experts", "--check")
    assert done.exit_code == 1
    assert found["failures"] == ["2 rows: fused_experts differs from the loop in float32"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--size", "70B"], "--size 70B: there are 35B-A3B, tiny"), (["--contenders", "x"], "--contenders x: there are")],
)
def test_wrong_arguments_are_refused(script: Any, arguments: list[str], message: str) -> None:
    done, found = script(*arguments)
    assert done.exit_code != 0
    assert message in done.output + str(done.exception)
    assert found == {}
