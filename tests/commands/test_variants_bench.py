"""`tools/bench/variants.py`: both ways compute the same, and are timed."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.docs.bench_scripts import tiny_run


def test_variants_compute_what_arguments_do_and_both_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny_run("variants", tmp_path, monkeypatch)
    kinds = [(one["kind"], one["way"]) for one in run.results]
    assert kinds == [(kind, way) for kind in ("decode", "prefill") for _ in range(2) for way in run.module.WAYS]
    for one in run.results:
        assert one["remark"] == ""
        assert one["figures"]["off"] < 1e-5
        assert one["figures"]["ratio"] == pytest.approx(one["figures"]["us"] / one["figures"]["us_argument"])
    assert "**Decode: 4 query heads, 2 kv heads of 16**" in run.output
    assert "there are 0.6B, 8B, tiny, and decode, prefill" in run.refusal("--only", "nothing")
