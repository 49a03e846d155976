"""A model whose weights are divided among processes is refused: its ranks would draw different tokens, silently."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.huggingface.sharded import KINDS, RANKS
from support.tiny_models import tiny_qwen3


@pytest.mark.slow
@pytest.mark.whole
def test_a_sharded_model_is_refused_with_what_to_use_and_a_whole_one_is_wrapped(tmp_path: Path) -> None:
    tiny_qwen3(eos_token_id=None).save_pretrained(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "support.huggingface.sharded", str(tmp_path)],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for kind in KINDS:
        said = [line for line in done.stdout.splitlines() if line.startswith(f"{kind}: ")]
        assert len(said) == RANKS
        if kind == "whole":
            assert said == ["whole: wrapped"] * RANKS
        else:
            processes = "2 processes" if kind == "tp_plan" else "several processes"
            assert all(f"divided among {processes}" in line for line in said), said
            assert all("load it whole" in line and "unwrapped" in line for line in said), said
