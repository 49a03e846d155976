"""`tools/bench/variants.py`: both ways compute the same, and are timed."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from support.docs.pages import CHECKOUT


def test_variants_compute_what_arguments_do_and_both_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(CHECKOUT / "tools" / "bench"))
    variants, app, file = importlib.import_module("variants"), typer.Typer(), tmp_path / "variants.json"
    app.command()(variants.main)
    monkeypatch.setattr(sys, "argv", ["variants.py"])
    common = ["--size", "tiny", "--device", "cpu", "--json", str(file), "--commit", "none"]
    done = CliRunner().invoke(app, common)
    assert done.exit_code == 0, done.output
    results = json.loads(file.read_text())["variants"]
    kinds = [(one["kind"], one["way"]) for one in results]
    assert kinds == [(kind, way) for kind in ("decode", "prefill") for _ in range(2) for way in variants.WAYS]
    for one in results:
        assert one["remark"] == ""
        assert one["figures"]["off"] < 1e-5
        assert one["figures"]["ratio"] == pytest.approx(one["figures"]["us"] / one["figures"]["us_argument"])
    assert "**Decode: 4 query heads, 2 kv heads of 16**" in done.output
    refused = CliRunner().invoke(app, ["--only", "nothing"])
    assert "there are 0.6B, 8B, tiny, and decode, prefill" in str(refused.exception or refused.output)
