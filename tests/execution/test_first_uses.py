"""A model's first use may come from any thread, in each mode and by each way in: the main thread has no part in it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from compiled_llm.config import Mode
from support.execution.first_uses import NEW_TOKENS, POOL, USES

DEFAULT = "cuda-graphs"


def first_use(mode: str, use: str, device: str) -> list[list[int]]:
    """Greedy tokens of a first use in a thread of a fresh process."""
    done = subprocess.run(
        [sys.executable, "-m", "support.execution.first_uses", mode, use, device],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=560,
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert said["own graphs"]
    tokens: list[list[int]] = said["tokens"]
    assert len(tokens) == (POOL if use == "a pool of 8" else 1)
    assert all(len(row) == NEW_TOKENS for row in tokens)
    assert all(row == tokens[0] for row in tokens)
    return tokens


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("mode", get_args(Mode))
def test_generate_may_be_called_first_in_a_thread_in_each_mode(mode: str) -> None:
    first_use(mode, "generate", "cuda")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("use", [use for use in USES if use != "generate"])
def test_each_way_in_may_come_first_in_a_thread(use: str) -> None:
    first_use(DEFAULT, use, "cuda")


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.parametrize("use", ["engine", "a pool of 8"])
def test_so_it_is_on_a_cpu(use: str) -> None:
    first_use("eager", use, "cpu")
