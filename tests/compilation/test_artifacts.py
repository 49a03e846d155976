"""A process that starts with artifacts compiles nothing, says the same, and leaves the machine as it was."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import compiled_llm
from compiled_llm.commands import compile
from compiled_llm.compilation.artifacts.artifacts import NotInArtifactsError
from compiled_llm.compilation.artifacts.made_for import sizes_made_for
from compiled_llm.compilation.artifacts.profile import Profile
from compiled_llm.compilation.artifacts.writing import unfinished, variables
from compiled_llm.compilation.graphs.step_key import StepKey
from compiled_llm.execution.lifecycle import runner_lifecycle
from support.characters import character_tokenizer
from support.compilation import start_with_artifacts
from support.compilation.artifact_folders import compiled
from support.compilation.start_with_artifacts import answers
from support.tiny_models import tiny_qwen3

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

NOTHING = {"graphs": 0, "C++ kernels": 0, "Triton kernels": 0, "FlashInfer kernels": 0}
GUESSES = {"method": "ngram", "num_speculative_tokens": 1}
GUESSING = ("--speculative-config", json.dumps(GUESSES))
OF_TORCH = {"_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"}
"""The variables that torch sets when it compiles anything."""


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_qwen3(eos_token_id=None, num_hidden_layers=1).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def artifacts(
    model_folder: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest, one_thread: None
) -> Path:
    """The folder that the command writes, or one with two of its programs: kernels take most of the time."""
    profile, target = tmp_path_factory.mktemp("saved") / "profile", tmp_path_factory.mktemp("written") / "artifacts"
    model = compiled_llm.wrap(loaded(model_folder), progress=False)
    made_for = sizes_made_for(model, model.compiled.facts.model_class, model.compiled.config, 64)
    Profile(made_for, {StepKey.decode(4): 3}).save(profile)
    if not request.config.getoption("whole"):
        compile_for_several_rows(model_folder, target, profile)
        return target
    done = compiled(model_folder, target, "--max-num-seqs", "64", "--profile", str(profile), "--quiet", *GUESSING)
    assert done.returncode == 0, done.stderr
    assert list(target.parent.iterdir()) == [target]
    return target


def compile_for_several_rows(model_folder: Path, target: Path, profile: Path) -> None:
    """As the command does, in this process; without programs for one row, for embeddings and for guesses."""
    prepare = runner_lifecycle.prepare
    with unfinished(target) as folder, pytest.MonkeyPatch.context() as patch:
        for name, value in variables(folder).items():
            patch.setenv(name, value)
        # A fourth argument is given for the program that reads embeddings, which no test here needs.
        patch.setattr(runner_lifecycle, "prepare", lambda *given: given[3:] or prepare(*given))
        patch.setattr(compile, "_run_some_requests", lambda engine: None)
        torch._dynamo.utils.counters.clear()  # which tell of graphs that cannot be kept
        model = loaded(model_folder)
        compile.compiled_into(folder, model, character_tokenizer(), {"progress": False}, 64, [2], profile)


@pytest.fixture(scope="module")
def model(model_folder: Path, artifacts: Path) -> Any:
    """A model with the artifacts, which traces each program once for all tests."""
    return compiled_llm.wrap(loaded(model_folder), artifacts=artifacts, progress=False)


@pytest.fixture(autouse=True)
def nothing_in_it_changes(artifacts: Path):
    before = hashes(artifacts)
    yield
    assert hashes(artifacts) == before


def hashes(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def loaded(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def started(model_folder: Path, artifacts: Path, cache: Path, **variables: str) -> subprocess.Popen[str]:
    """Begin a process whose own caches are empty."""
    program = [sys.executable, start_with_artifacts.__file__, str(model_folder), str(artifacts), "cpu", "float32"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(cache), **variables}
    return subprocess.Popen(program, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def result_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    return json.loads(out.splitlines()[-1])


def compile_nothing_and_say_what_huggingface_says(
    model_folder: Path, processes: list[subprocess.Popen[str]], caches: list[Path]
) -> None:
    expected = answers(loaded(model_folder))
    for result in map(result_of, processes):
        assert result["answers"] == expected
        assert result["compiled"] == {"Inductor": 0, "AOTAutograd": 0}
        assert result["builds"] == NOTHING
        assert result["graphs"] == 0  # all of them are kept
        assert result["tracing_seconds"] == 0
        assert set(result["changed variables"]) <= OF_TORCH
    assert [path for cache in caches for path in cache.rglob("*") if path.is_file()] == []


@pytest.mark.whole
def test_a_process_without_a_compiler_compiles_nothing_and_says_what_huggingface_says(
    model_folder: Path, artifacts: Path, tmp_path: Path
) -> None:
    (programs := tmp_path / "bin").mkdir()
    process = started(model_folder, artifacts, tmp_path / "one", PATH=str(programs))
    compile_nothing_and_say_what_huggingface_says(model_folder, [process], [tmp_path / "one"])


@pytest.mark.whole
def test_two_processes_at_once_compile_nothing_and_say_what_huggingface_says(
    model_folder: Path, artifacts: Path, tmp_path: Path
) -> None:
    caches = [tmp_path / "one", tmp_path / "two"]
    processes = [started(model_folder, artifacts, cache) for cache in caches]
    compile_nothing_and_say_what_huggingface_says(model_folder, processes, caches)


def test_a_damaged_file_of_compiled_code_is_an_error_in_wrap_which_changes_nothing(
    model_folder: Path, artifacts: Path, tmp_path: Path, seed: int
) -> None:
    shutil.copytree(artifacts, tmp_path / "copy")
    libraries = sorted((tmp_path / "copy").rglob("*.so"))
    path = random.Random(seed).choice(libraries)
    path.write_bytes(path.read_bytes()[:-1])
    model = loaded(model_folder)
    before = type(model), dict(vars(model))
    with pytest.raises(ValueError, match=r"is damaged: inductor/.*\.so is not what it was; write it again"):
        compiled_llm.wrap(model, artifacts=tmp_path / "copy")
    assert (type(model), vars(model)) == before
    compiled_llm.wrap(model, artifacts=artifacts, progress=False)


def test_another_dtype_config_option_or_number_of_threads_is_refused(
    model_folder: Path, artifacts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(message: str, model: Any, **options: Any) -> None:
        with pytest.raises(ValueError, match=message):
            compiled_llm.wrap(model, artifacts=artifacts, progress=False, **options)

    refused(r"dtype 'torch.float32' there, 'torch.bfloat16' here", loaded(model_folder, dtype=torch.bfloat16))
    other = loaded(model_folder)
    other.config.rms_norm_eps = 1e-3
    refused(r"config.rms_norm_eps 1e-06 there, 0.001 here", other)
    refused(r"config.num_hidden_layers 1 there, 2 here", tiny_qwen3(eos_token_id=None))
    model = loaded(model_folder)
    refused("option prefill_tokens 8192 there, 16 here", model, prefill_tokens=16)
    refused("option mode 'cuda-graphs' there, 'compile' here", model, mode="compile")
    refused("have room for 64 rows, and 65 are asked for", model, max_batch_size=65)
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    refused(r"torch '2\..*' there, '2.99.0' here", model)
    monkeypatch.undo()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    refused("threads of torch 1 there, 3 here", model)


def test_eager_runs_no_compiled_code(model_folder: Path, artifacts: Path) -> None:
    with pytest.raises(ValueError, match=r"hold compiled code, and mode='eager' runs none"):
        compiled_llm.wrap(loaded(model_folder), mode="eager", artifacts=artifacts)
    with pytest.raises(ValueError, match="artifacts=3: must be the path of a folder, or None"):
        compiled_llm.wrap(loaded(model_folder), artifacts=3)


def test_what_is_not_there_is_an_error_not_a_compile_and_the_next_call_works(model_folder: Path, model: Any) -> None:
    expected = answers(loaded(model_folder), "two")
    assert answers(model, "two") == expected
    assert (before := model.compiled.stats().builds) == NOTHING
    act = model.model.layers[0].mlp.act_fn
    model.model.layers[0].mlp.act_fn = nn.ReLU()
    with pytest.raises(NotInArtifactsError, match="a graph is not among them"):
        answers(model, "two")
    assert model.compiled.stats().builds == {**before, "graphs": 1}
    model.model.layers[0].mlp.act_fn = act
    assert answers(model, "two") == expected


def test_an_engine_has_the_room_that_was_compiled_for(model: Any) -> None:
    before = model.compiled.stats().builds
    with pytest.raises(ValueError, match="have room for 64 rows, and 65 are asked for"):
        compiled_llm.Engine(model, max_num_seqs=65)
    with compiled_llm.Engine(model, max_num_seqs=8) as engine:
        engine.generate([[5, 6], [7]] * 4, compiled_llm.SamplingParams(max_tokens=3, seed=0))
    assert model.compiled.stats().builds == before


@pytest.mark.whole
def test_steps_that_guess_are_in_it(model_folder: Path, artifacts: Path) -> None:
    """Fewer pages than where it was written hold shorter texts."""
    model = compiled_llm.wrap(loaded(model_folder), artifacts=artifacts, kv_memory="160 tokens", progress=False)
    params = compiled_llm.SamplingParams(max_tokens=40, temperature=0.0)
    with compiled_llm.Engine(model, max_num_seqs=2, speculative_config=GUESSES) as engine:
        engine.warmup([2])
        engine.generate([[5, 6, 7] * 4, [8, 9] * 5], params)
        stats = engine.stats()
    assert stats.drafts is not None
    assert stats.drafts.draft_tokens > 0
    assert model.compiled.stats().builds == NOTHING


@pytest.mark.whole
def test_an_error_names_the_option_that_has_steps_compiled_which_are_not_in_it(
    model_folder: Path, artifacts: Path
) -> None:
    model = compiled_llm.wrap(loaded(model_folder), artifacts=artifacts, progress=False)
    wanted = {**GUESSES, "num_speculative_tokens": 7}
    with compiled_llm.Engine(model, max_num_seqs=2, speculative_config=wanted) as engine:
        with pytest.raises(NotInArtifactsError, match="of 'decode, larger batches, 4 tokens with drafts'") as found:
            engine.warmup([2])
        assert f"`compiled-llm compile --speculative-config '{json.dumps(wanted)}'`" in str(found.value)


def test_what_the_profile_in_it_names_is_prepared_by_auto(
    model_folder: Path, model: Any, artifacts: Path, tmp_path: Path
) -> None:
    before = model.compiled.stats()
    with compiled_llm.Engine(model, max_num_seqs=64) as engine:
        engine.warmup("auto")
    assert {*model.compiled.stats().buckets} == {*before.buckets, 4}
    assert model.compiled.stats().builds == before.builds
    shutil.copytree(artifacts, tmp_path / "copy")
    path = tmp_path / "copy" / "profile.json"
    path.write_bytes(path.read_bytes().replace(b'"uses": 3', b'"uses": 4'))
    with pytest.raises(ValueError, match=r"is damaged: profile.json is not what it was"):
        compiled_llm.wrap(loaded(model_folder), artifacts=tmp_path / "copy")


@pytest.mark.whole
def test_a_profile_of_another_model_is_not_put_into_artifacts(model_folder: Path, tmp_path: Path) -> None:
    Profile({"model": "another"}, {}).save(tmp_path / "profile")
    done = compiled(model_folder, tmp_path / "artifacts", "--profile", str(tmp_path / "profile"), "--quiet")
    assert done.returncode == 2
    assert "it was saved for something else: model 'another' there" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["profile"]


@pytest.mark.whole
def test_a_copy_of_a_model_starts_with_them_too(model_folder: Path, artifacts: Path) -> None:
    model = copy.deepcopy(compiled_llm.wrap(loaded(model_folder), artifacts=artifacts, progress=False))
    assert answers(model, "two") == answers(loaded(model_folder), "two")
    assert model.compiled.stats().builds == NOTHING
