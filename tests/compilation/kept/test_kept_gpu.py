"""On CUDA a process that takes kept programs builds none of Inductor's kernels, and its bits are those of the first."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from compiled_llm.compilation.artifacts.checked_folder import manifest_of
from compiled_llm.compilation.artifacts.manifest import NAME
from compiled_llm.compilation.kept.part import FOLDER
from support.characters import character_tokenizer
from support.compilation import start_with_artifacts
from support.compilation.artifact_folders import compiled
from support.compilation.kept_programs import KEPT_FAMILIES, result_of
from support.tiny_models import tiny_qwen3

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.unchecked_pages]

KEPT = {"COMPILED_LLM_KEEP_PROGRAMS": "1"}  # other tests keep none
NOTHING = {"graphs": 0, "C++ kernels": 0, "Triton kernels": 0, "FlashInfer kernels": 0}


class Starts(NamedTuple):
    """What processes without artifacts have said, one after the other, and where they have kept their programs."""

    first: dict[str, Any]
    second: dict[str, Any]
    kept: Path
    triton: Path
    built: set[Path]  # by Triton, in the first


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> Starts:
    return two_starts("Qwen3", tmp_path_factory.mktemp("plain"))


def two_starts(family: str, home: Path) -> Starts:
    """Two processes; the second one finds no kernel of Inductor's but those that were kept, and other ones."""
    caches = {"COMPILED_LLM_CACHE": str(home / "ours"), "TRITON_CACHE_DIR": str(home / "triton")}
    environment = {**KEPT, **caches, "TORCHINDUCTOR_CACHE_DIR": str(home / "inductor")}
    first = result_of("plain", family, home, environment, "cuda")
    built = kernels_of_inductor(home / "triton")
    for path in built:
        shutil.rmtree(path.parent)
    second = result_of("plain", family, home, {**environment, "TORCHINDUCTOR_CACHE_DIR": str(home / "empty")}, "cuda")
    return Starts(first, second, home / "ours" / "programs", home / "triton", built)


def kernels_of_inductor(folder: Path) -> set[Path]:
    return set(folder.rglob("triton_*.cubin"))


def test_the_second_process_traces_nothing_and_its_bits_are_the_same(starts: Starts) -> None:
    assert_kept(starts.first, starts.second)


@pytest.mark.parametrize("family", [family for family in KEPT_FAMILIES if family != "Qwen3"])
def test_so_it_is_with_each_family(family: str, tmp_path: Path) -> None:
    starts = two_starts(family, tmp_path)
    assert_kept(starts.first, starts.second)


def assert_kept(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert first["refusals"] == second["refusals"] == []
    assert set(first["programs"].values()) == {"traced"}
    assert second["programs"] == dict.fromkeys(first["programs"], "kept")
    assert second["traces"] == 0
    assert second["imported"] == []
    assert (second["answers"], second["bits"]) == (first["answers"], first["bits"])
    assert first["CUDA graphs"] > 0
    # What can be launched at once waits for no capture, and so no larger step is captured for those who would wait.
    assert second["CUDA graphs"] > 0


def test_it_launches_the_kernels_that_were_kept_and_starts_no_process_to_build_others(starts: Starts) -> None:
    assert starts.built
    assert kernels_of_inductor(starts.kept)
    assert kernels_of_inductor(starts.triton) == set()
    assert starts.second["processes"] == 0


def test_a_program_has_no_more_of_a_kernel_than_what_it_is_loaded_from(starts: Starts) -> None:
    endings = {path.suffix for path in starts.kept.rglob("triton/*/*")}
    assert endings == {".json", ".cubin"}


def test_a_process_with_artifacts_takes_programs_and_builds_nothing(tmp_path: Path) -> None:
    model, artifacts = tmp_path / "model", tmp_path / "artifacts"
    tiny_qwen3(eos_token_id=None, head_dim=64).save_pretrained(model)
    character_tokenizer().save_pretrained(model)
    done = compiled(model, artifacts, "--device", "cuda", "--max-num-seqs", "64", "--warmup", "1,2", "--quiet")
    assert done.returncode == 0, done.stderr
    assert list((artifacts / FOLDER).glob("*.json"))
    kept = started(model, artifacts, tmp_path / "kept")
    traced = started(model, without_programs(artifacts, tmp_path / "others"), tmp_path / "traced")
    assert set(kept["programs"].values()) == {"kept"}
    assert set(traced["programs"].values()) == {"traced"}
    assert kept["answers"] == traced["answers"]
    assert kept["builds"] == traced["builds"] == NOTHING


def without_programs(artifacts: Path, target: Path) -> Path:
    """The same folder, as if no program could have been kept."""
    shutil.copytree(artifacts, target)
    shutil.rmtree(target / FOLDER)
    manifest = manifest_of(artifacts)
    files = {name: manifest.files[name] for name in manifest.files if (target / name).exists()}
    (target / NAME).write_bytes(replace(manifest, files=files).encoded())
    return target


def started(model: Path, artifacts: Path, home: Path) -> dict[str, Any]:
    """What a process says whose own caches are empty."""
    program = [sys.executable, start_with_artifacts.__file__, str(model), str(artifacts), "cuda", "bfloat16"]
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(home / "inductor"), "TRITON_CACHE_DIR": str(home / "triton")}
    paths = {"PYTHONPATH": os.pathsep.join(sys.path), "FLASHINFER_WORKSPACE_BASE": str(home / "flashinfer")}
    done = subprocess.run(program, env={**os.environ, **caches, **paths}, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
