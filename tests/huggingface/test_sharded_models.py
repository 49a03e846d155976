"""A model whose weights are divided among processes is refused: its ranks would draw different tokens, silently."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.huggingface.sharded import RANKS
from support.tiny_models import tiny_qwen3


def said_by_ranks(kind: str, folder: Path) -> list[str]:
    tiny_qwen3(eos_token_id=None).save_pretrained(folder)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    done = subprocess.run(
        [*torchrun, "-m", "support.huggingface.sharded", str(folder), kind],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith(("refused", "wrapped"))]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tp_plan", "fully_shard", "parallelize_module"])
def test_a_sharded_model_is_refused_with_what_to_use(kind: str, tmp_path: Path) -> None:
    said = said_by_ranks(kind, tmp_path)
    assert len(said) == RANKS
    processes = "2 processes" if kind == "tp_plan" else "several processes"
    assert all(f"divided among {processes}" in line for line in said), said
    assert all("load it whole" in line and "unwrapped" in line for line in said), said


@pytest.mark.slow
def test_a_whole_model_in_each_of_several_processes_is_wrapped(tmp_path: Path) -> None:
    assert said_by_ranks("whole", tmp_path) == ["wrapped"] * RANKS
