"""What a user names as a model, found or refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from huggingface_hub import errors

from compiled_llm.commands.loading import hub
from compiled_llm.commands.loading.load import load
from compiled_llm.commands.loading.source import locate


def test_a_folder_without_a_config_says_so_and_names_its_gguf(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no config\.json; name a folder that save_pretrained has written"):
        locate(str(tmp_path))
    (tmp_path / "weights.gguf").touch()
    with pytest.raises(ValueError, match=r"holds no config\.json; name its GGUF file: /.*/weights\.gguf"):
        locate(str(tmp_path))


def test_a_folder_without_a_tokenizer_is_told_how_to_add_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    with pytest.raises(ValueError, match=r"holds no tokenizer, .*; add it with tokenizer\.save_pretrained\('/.*'\)"):
        locate(str(tmp_path))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "qwen.tiktoken"])
def test_any_kind_of_tokenizer_will_do(name: str, tmp_path: Path) -> None:
    for file in ("config.json", name):
        (tmp_path / file).touch()
    assert locate(str(tmp_path)).location == str(tmp_path)


def test_an_adapter_alone_is_a_source_if_peft_can_find_its_base(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "adapter_config.json").touch()
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    assert locate(str(tmp_path)).location == str(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(RuntimeError, match="an adapter alone: install peft"):
        locate(str(tmp_path))


@pytest.fixture
def asked(monkeypatch) -> list[str]:
    """The addresses that the hub was asked for, each answered as the test says."""
    asked: list[str] = []
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda *_: None)
    return asked


def answering(monkeypatch, asked: list[str], error: Exception | None) -> None:
    def answer(url: str) -> None:
        asked.append(url)
        if error is not None:
            raise error

    monkeypatch.setattr(hub, "get_hf_file_metadata", answer)


NOT_FOUND: Any = SimpleNamespace(headers={}, request=None, status_code=404)
NOTHING_HERE = "no folder or file of that name here, and "


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError("no route"), NOTHING_HERE + r"the hub cannot be asked \(no route\)"),
        (errors.OfflineModeIsEnabled("offline"), "without a network, name a folder, or `demo`"),
        (errors.RepositoryNotFoundError("404", response=NOT_FOUND), NOTHING_HERE + "no model on the hub"),
        (errors.GatedRepoError("ask for access", response=NOT_FOUND), "nosuch cannot be loaded: ask for access"),
    ],
)
def test_the_hub_is_asked_once_after_saying_that_nothing_is_here(
    monkeypatch, capsys, asked: list[str], error: Exception, message: str
) -> None:
    answering(monkeypatch, asked, error)
    with pytest.raises(RuntimeError, match=message):
        load("nosuch")
    assert [url.endswith("/nosuch/resolve/main/config.json") for url in asked] == [True]
    assert capsys.readouterr().err == "compiled_llm: no folder or file 'nosuch' here: asking the hub\n"


def test_what_the_hub_has_or_what_was_downloaded_is_left_to_transformers(monkeypatch, asked: list[str]) -> None:
    for error in (None, errors.RemoteEntryNotFoundError("404", response=NOT_FOUND)):
        answering(monkeypatch, asked, error)
        assert not locate("somebodys/model", progress=False).is_local
    assert len(asked) == 2
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda *_: "config.json")
    assert not locate("somebodys/model", progress=False).is_local
    assert len(asked) == 2


def test_messages_of_transformers_are_whole(monkeypatch, model_folder: Path) -> None:
    error = ValueError("Couldn't instantiate the backend tokenizer from one of:\n(1) a file\nYou need sentencepiece")
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", Mock(side_effect=error))
    with pytest.raises(RuntimeError, match=r"from one of:\n\(1\) a file\nYou need sentencepiece"):
        load(str(model_folder), progress=False)
