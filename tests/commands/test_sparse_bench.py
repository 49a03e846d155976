"""`tools/bench/sparse.py`: what reads chosen keys and dense decode are timed, for all kinds of blocks."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.docs.bench_scripts import bench_script, tiny_run


def test_all_kinds_of_blocks_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny_run("sparse", tmp_path, monkeypatch)
    assert [(one["kind"], one["block"]) for one in run.results] == [
        (kind, block) for kind, blocks in run.module.BLOCKS.items() for block in blocks
    ]
    for one in run.results:
        assert one["remark"] == ""
        assert one["figures"]["of_dense"] == pytest.approx(one["figures"]["us_dense"] / one["figures"]["us"])
    assert "**block_sparse_attention: 4 query heads, 2 kv heads of 16**" in run.output
    assert "there are full, tiny, and pages, matrix, tokens" in run.refusal("--only", "nothing")


def test_bytes_are_those_of_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    case = bench_script("sparse", monkeypatch).Case
    assert case("pages", (32, 8, 128), 3, 16, 1000, 64).nbytes(2) == 3 * 64 * 2 * 8 * 128 * 2
    assert case("tokens", (16, 512, 64), 3, 1, 1000, 64).nbytes(2) == 3 * 64 * 576 * 2
