"""A cold engine answers from its first second on, whatever it compiles and captures meanwhile.

Each case has a process of its own, and empty caches; three of each with --whole.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

CASES = [
    ["1 drafts"],
    ["drafts"],
    ["7 drafts"],
    ["mixed"],
    ["mixed", "drafts"],
    ["log-probabilities", "drafts"],
    ["hidden states"],
    ["grammars", "drafts"],
    ["images", "mixed"],
    ["adapters", "drafts"],
    ["fp8 pages", "mixed", "drafts"],
    ["batch_invariant"],
    ["experts"],
    ["recurrent"],
]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [0, *(pytest.param(more, marks=pytest.mark.whole) for more in (1, 2))])
@pytest.mark.parametrize("features", CASES, ids=" and ".join)
def test_a_cold_engine_answers_from_its_first_second_on(
    features: list[str], number: int, seed: int, tmp_path: Path
) -> None:
    caches = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "COMPILED_LLM_CACHE": "kept"}
    environment = {**os.environ, **{name: str(tmp_path / folder) for name, folder in caches.items()}}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS), *filter(None, [environment.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "support.combined.cold", *features, "--seed", str(10 * seed + number)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=880)
    said = ended.stdout.strip().splitlines()[-1:] or [ended.stderr[-3000:]]
    print(said[0])
    assert ended.returncode == 0, json.dumps(said[0])
