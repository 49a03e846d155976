"""`tools/bench/sparse.py`: what reads chosen keys and dense decode are timed, for all kinds of blocks."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from support.docs.pages import CHECKOUT


def test_all_kinds_of_blocks_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(CHECKOUT / "tools" / "bench"))
    sparse, app, file = importlib.import_module("sparse"), typer.Typer(), tmp_path / "sparse.json"
    app.command()(sparse.main)
    monkeypatch.setattr(sys, "argv", ["sparse.py"])
    common = ["--size", "tiny", "--device", "cpu", "--json", str(file), "--commit", "none"]
    done = CliRunner().invoke(app, common)
    assert done.exit_code == 0, done.output
    results = json.loads(file.read_text())["sparse"]
    assert [(one["kind"], one["block"]) for one in results] == [
        (kind, block) for kind, blocks in sparse.BLOCKS.items() for block in blocks
    ]
    for one in results:
        assert one["remark"] == ""
        assert one["figures"]["of_dense"] == pytest.approx(one["figures"]["us_dense"] / one["figures"]["us"])
    assert "**block_sparse_attention: 4 query heads, 2 kv heads of 16**" in done.output
    refused = CliRunner().invoke(app, ["--only", "nothing"])
    assert "there are full, tiny, and pages, matrix, tokens" in str(refused.exception or refused.output)


def test_bytes_are_those_of_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(CHECKOUT / "tools" / "bench"))
    case = importlib.import_module("sparse").Case
    assert case("pages", (32, 8, 128), 3, 16, 1000, 64).nbytes(2) == 3 * 64 * 2 * 8 * 128 * 2
    assert case("tokens", (16, 512, 64), 3, 1, 1000, 64).nbytes(2) == 3 * 64 * 576 * 2
