"""A process that takes kept programs says what one says that traces them, bit for bit, and enters Dynamo nowhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.codecache import CppPythonBindingsCodeCache

import compiled_llm
from compiled_llm.compat.torch.inductor import inductor_cache
from compiled_llm.compilation.kept import part
from support.compilation import kept_programs
from support.huggingface.families import FAMILIES
from support.parity import FEW_PAGES, greedy, mixed_prompts
from support.tiny_models import ONE_LAYER, tiny_llama

pytestmark = pytest.mark.slow

ALWAYS = ("Llama", "Gemma3")
OTHERS = (
    *("Qwen3", "Qwen2", "Mistral", "Mixtral", "Phi3", "Gemma2", "GPT2LMHead", "Cohere", "Olmoe", "Olmo2", "Granite"),
    *("Starcoder2", "StableLm", "Qwen3Moe", "GPTNeoX", "Falcon", "OPT", "Glm4", "SmolLM3", "GptOss", "DeepseekV3"),
)


def result_of(way: str, family: str, folder: Path) -> dict[str, Any]:
    program = [sys.executable, kept_programs.__file__, way, family, str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def each_family() -> pytest.MarkDecorator:
    known = [name for name in OTHERS if name in FAMILIES or name == "Qwen3"]
    cases = [*ALWAYS, *(pytest.param(name, marks=pytest.mark.whole) for name in known)]
    return pytest.mark.parametrize("family", cases)


@each_family()
def test_tokens_and_logits_are_those_of_a_process_that_traces(family: str, tmp_path: Path) -> None:
    (tmp_path / "inductor").symlink_to(inductor_cache())
    traced = result_of("keep", family, tmp_path)
    assert traced["not kept"] == {}
    taken = result_of("take", family, tmp_path)
    assert taken["programs"] == dict.fromkeys(traced["programs"], "kept")
    assert (taken["answers"], taken["bits"]) == (traced["answers"], traced["bits"])
    assert taken["traces"] == 0
    assert taken["imported"] == []


# ---- in one process, between two calls


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefill and decode of one row of a Llama of one layer."""
    CppPythonBindingsCodeCache.cache_clear()  # other tests may have loaded the same kernels from caches of their own
    folder = tmp_path_factory.mktemp("kept")
    (folder / "inductor").symlink_to(inductor_cache())
    with part.recording(folder):
        answer(compiled_llm.wrap(tiny_llama(**ONE_LAYER), **FEW_PAGES))
    return folder


def answer(model: Any) -> list[list[int]]:
    return greedy(model, mixed_prompts([7], 128, seed=0), 3).tolist()


def taking_model(folder: Path) -> Any:
    with kept_programs.taking(folder):
        model = compiled_llm.wrap(tiny_llama(**ONE_LAYER), **FEW_PAGES)
        answer(model)
    assert set(model.compiled.stats().programs.values()) == {"kept"}
    return model


def move_tensors(model: Any) -> None:
    layer = model.model.layers[0].mlp.down_proj
    layer.weight.data = layer.weight.data.clone() * 2


def write_to_tensors(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(-3)


def replace_a_parameter(model: Any) -> None:
    old = model.model.layers[0].mlp.up_proj.weight
    model.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(old.detach().flip(0))


@pytest.mark.parametrize("change", [move_tensors, write_to_tensors, replace_a_parameter])
def test_tensors_that_were_moved_or_written_to_are_read_where_they_are(
    kept: Path, change: Callable[[Any], None]
) -> None:
    model, plain = taking_model(kept), tiny_llama(**ONE_LAYER)
    before = answer(model)
    change(model)
    change(plain)
    assert answer(model) == answer(plain) != before
    assert set(model.compiled.stats().programs.values()) == {"kept"}


def test_a_model_that_has_changed_gives_its_programs_up_and_is_traced(kept: Path) -> None:
    model, plain = taking_model(kept), tiny_llama(**ONE_LAYER)
    for each in (model, plain):
        each.model.layers[0].mlp.act_fn = torch.nn.ReLU()
    assert answer(model) == answer(plain)
    said = model.compiled.stats().programs
    assert said
    assert "kept" not in said.values()
    assert model.compiled.stats().graphs == len(said)
