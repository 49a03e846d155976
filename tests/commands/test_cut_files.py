"""A file of weights that ends too early, since its download was broken off, is named in one sentence."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from compiled_llm.commands.loading.cut_files import cut_file
from compiled_llm.commands.loading.load import load
from support.tiny_models import tiny_llama

gguf = pytest.importorskip("gguf")
from support.tiny_gguf import write_gguf  # noqa: E402


@pytest.fixture(scope="module")
def whole_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "model.gguf"
    write_gguf(path, tiny_llama(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2))
    return path


@pytest.fixture
def folder(model_folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(model_folder, tmp_path / "theirs")


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def refusal(place: Path) -> str:
    with pytest.raises(RuntimeError) as refused:
        load(str(place), progress=False)
    return str(refused.value)


@pytest.mark.parametrize(
    ("share", "in_header"), [(0.0, True), (0.001, True), (0.01, True), (0.3, False), (0.999, False)]
)
def test_a_gguf_file_that_is_cut_in_its_header_or_in_its_tensors_is_named(
    whole_gguf: Path, tmp_path: Path, share: float, in_header: bool
) -> None:
    path, whole = tmp_path / "model.gguf", whole_gguf.stat().st_size
    size = int(share * whole)
    shutil.copy(whole_gguf, path)
    cut(path, size)
    after = f"{size:,} bytes" if in_header else f"{size:,} of {whole:,} bytes"
    assert refusal(path) == f"{path} cannot be loaded: model.gguf ends too early, after {after}; download it again"


def test_wherever_a_gguf_file_is_cut_it_is_told(whole_gguf: Path, tmp_path: Path) -> None:
    path, whole = tmp_path / "model.gguf", whole_gguf.read_bytes()
    assert cut_file(str(whole_gguf.parent), whole_gguf.name) is None
    for size in [*range(0, len(whole) // 8, 97), *range(0, len(whole), 4001), len(whole) - 1]:
        path.write_bytes(whole[:size])
        assert cut_file(str(tmp_path), path.name) is not None, size


def test_a_safetensors_file_that_is_cut_is_named(folder: Path) -> None:
    file = folder / "model.safetensors"
    whole = file.stat().st_size
    cut(file, whole - 1)
    said = f"{folder} cannot be loaded: model.safetensors ends too early, after"
    assert refusal(folder) == f"{said} {whole - 1:,} of {whole:,} bytes; download it again"
    for size in (100, 4, 0):
        cut(file, size)
        assert refusal(folder) == f"{said} {size} bytes; download it again"


def test_a_pickle_that_is_cut_is_named(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    file = folder / "pytorch_model.bin"
    torch.save(AutoModelForCausalLM.from_config(tiny_llama().config).state_dict(), file)
    assert cut_file(str(folder), None) is None
    cut(file, 5000)
    assert refusal(folder).endswith("pytorch_model.bin ends too early, after 5,000 bytes; download it again")


@pytest.mark.parametrize("content", [b"not a model", b"<!doctype html>" * 99, b"GGUF" + b"\xff" * 999])
def test_what_is_something_else_is_not_called_cut(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    assert cut_file(str(folder), None) is None


def test_a_link_that_leads_nowhere_is_left_to_others(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("nowhere")
    assert cut_file(str(folder), None) is None
