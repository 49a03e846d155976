"""A process that starts with artifacts of a recurrent model compiles nothing, and says what HuggingFace says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

import compiled_llm
from support.characters import character_tokenizer
from support.compilation import start_with_artifacts
from support.compilation.artifact_folders import compiled
from support.compilation.start_with_artifacts import answers
from support.engine.tiny_engines import greedy
from support.huggingface.recurrent_families import recurrent_model
from support.parity import alone

pytestmark = [pytest.mark.slow, pytest.mark.whole, pytest.mark.usefixtures("one_thread")]

NOTHING = {"graphs": 0, "C++ kernels": 0, "Triton kernels": 0, "FlashInfer kernels": 0}
FAMILIES = ["Qwen3_5", "Jamba", "Mamba2", "Lfm2"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_process_that_starts_with_artifacts_compiles_nothing(family: str, tmp_path: Path) -> None:
    folder, artifacts, cache = tmp_path / "model", tmp_path / "artifacts", tmp_path / "cache"
    recurrent_model(family, eos_token_id=None).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    done = compiled(folder, artifacts, "--max-num-seqs", "64", "--quiet")
    assert done.returncode == 0, done.stderr
    program = [sys.executable, start_with_artifacts.__file__, str(folder), str(artifacts), "cpu", "float32"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    run = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    plain: Any = AutoModelForCausalLM.from_pretrained(folder)
    assert result["answers"] == answers(plain)
    assert result["compiled"] == {"Inductor": 0, "AOTAutograd": 0}
    assert result["builds"] == NOTHING

    model = compiled_llm.wrap(AutoModelForCausalLM.from_pretrained(folder), artifacts=artifacts, progress=False)
    prompts = [list(range(5, 75)), [9, 8, 7]]
    with compiled_llm.Engine(model, max_num_seqs=8) as engine:
        for _ in range(2):
            for output, prompt in zip(engine.generate(prompts, greedy(6)), prompts, strict=True):
                assert output.token_ids == alone(plain, prompt, 6)
        assert engine.stats().cached_tokens == 64
        engine.sleep()
        engine.wake()
        assert engine.generate(prompts[:1], greedy(6))[0].token_ids == alone(plain, prompts[0], 6)
        assert model.compiled.stats().states == (2 + 4 * 64 + 32, 2, 2 + 4 * 64 + 32 - 3, 1)
    assert model.compiled.stats().builds == NOTHING
