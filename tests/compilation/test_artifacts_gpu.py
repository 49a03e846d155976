"""On CUDA a process that starts with artifacts has nothing built by Inductor, Triton or FlashInfer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from support.characters import character_tokenizer
from support.compilation import start_with_artifacts
from support.compilation.artifact_folders import compiled
from support.tiny_models import tiny_qwen3

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.unchecked_pages]


class Plain(NamedTuple):
    """What processes without artifacts have said, and all kernels that Triton has built after each."""

    answers: list[Any]
    built: list[set[Path]]


NOTHING = {"graphs": 0, "C++ kernels": 0, "Triton kernels": 0, "FlashInfer kernels": 0}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_qwen3(eos_token_id=None, head_dim=64).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def artifacts(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("written") / "artifacts"
    options = ("--device", "cuda", "--max-num-seqs", "64", "--warmup", "1,2,4,8", "--quiet")
    done = compiled(model_folder, target, *options)
    assert done.returncode == 0, done.stderr
    return target


def caches_in(home: Path) -> dict[str, str]:
    """The environment of a process that builds into, and looks in, folders of its own."""
    return {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(home / "inductor"),
        "TRITON_CACHE_DIR": str(home / "triton"),
        "FLASHINFER_WORKSPACE_BASE": str(home / "flashinfer"),
    }


def said_by(command: list[str], environment: dict[str, str]) -> Any:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def started(model_folder: Path, artifacts: Path, home: Path) -> dict[str, Any]:
    """What a process says whose own caches are empty."""
    program = [sys.executable, start_with_artifacts.__file__, str(model_folder), str(artifacts), "cuda", "bfloat16"]
    return said_by(program, caches_in(home))


def test_the_folder_holds_kernels_of_inductor_triton_and_flashinfer(artifacts: Path) -> None:
    assert list((artifacts / "inductor" / "fxgraph").rglob("*"))
    assert list((artifacts / "triton").rglob("*.cubin"))
    if find_spec("flashinfer") is not None:  # else prefills run by kernels of Triton's
        assert list((artifacts / "flashinfer").rglob("*.so"))


def test_two_processes_build_nothing_and_say_the_same(model_folder: Path, artifacts: Path, tmp_path: Path) -> None:
    results = [started(model_folder, artifacts, tmp_path / name) for name in ("one", "two")]
    for result in results:
        assert result["compiled"] == {"Inductor": 0, "AOTAutograd": 0}
        assert result["built by Triton"] == []
        assert result["builds"] == NOTHING
        assert result["answers"] == results[0]["answers"]
    built = [path for path in tmp_path.rglob("*") if path.suffix in (".so", ".cubin", ".o")]
    assert built == []


@pytest.fixture(scope="module")
def without_artifacts(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """Two processes without artifacts, one after the other, that share caches which were empty."""
    program = (
        "import sys, json, torch, compiled_llm\n"
        "from transformers import AutoModelForCausalLM\n"
        "from support.compilation.start_with_artifacts import answers\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16).to('cuda')\n"
        "print(json.dumps(answers(compiled_llm.wrap(model, progress=False))))\n"
    )
    tests = str(Path(__file__).parents[1])
    home = tmp_path_factory.mktemp("plain")
    environment = {**caches_in(home), "PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])}
    answers, built = [], []
    for _ in range(2):
        answers.append(said_by([sys.executable, "-c", program, str(model_folder)], environment))
        built.append({path.relative_to(home) for path in home.rglob("*.cubin")})
    return Plain(answers, built)


def test_tokens_are_those_of_a_process_without_artifacts(
    model_folder: Path, artifacts: Path, without_artifacts: Plain, tmp_path: Path
) -> None:
    expected = started(model_folder, artifacts, tmp_path)["answers"]
    assert without_artifacts.answers == [expected, expected]


def test_the_second_of_two_processes_without_artifacts_builds_no_kernel(without_artifacts: Plain) -> None:
    """Which ptxas is part of a kernel's key must not depend on how far Inductor's processes are."""
    first, second = without_artifacts.built
    assert first
    assert second == first
