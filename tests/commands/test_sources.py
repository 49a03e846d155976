"""A model that a user names is found or refused; its code never runs, and what it says reaches a terminal as text."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from huggingface_hub import errors
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from compiled_llm.commands.app import app
from compiled_llm.commands.generate.streamer import AnswerStreamer
from compiled_llm.commands.loading import hub
from compiled_llm.commands.loading.load import load
from compiled_llm.commands.loading.source import locate
from compiled_llm.commands.printable import printable


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


def test_a_model_without_a_tokenizer_takes_another_ones(tmp_path: Path) -> None:
    model, other = tmp_path / "model", tmp_path / "other"
    for folder, file in ((model, "config.json"), (other, "tokenizer.json")):
        folder.mkdir()
        (folder / file).touch()
    source = locate(str(model), tokenizer=str(other))
    assert source.tokenizer_place == (str(other), None)
    with pytest.raises(ValueError, match=r"--tokenizer /.*: the folder holds no tokenizer"):
        locate(str(model), tokenizer=str(model))
    with pytest.raises(ValueError, match=r"--tokenizer \./none: there is no such folder; name one, or a hub id"):
        locate(str(model), tokenizer="./none")


def test_a_chat_template_is_read_before_the_model(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    for text in ("{% for a in messages %}{% break %}{% endfor %}", "{% generation %}a{% endgeneration %}"):
        file.write_text(text)
        assert locate("demo", chat_template=file).chat_template == text
    file.write_text("\n{% for %}")
    with pytest.raises(ValueError, match=r"--chat-template /.*, line 2: is no Jinja template: Expected an expression"):
        locate("demo", chat_template=file)
    file.write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"--chat-template /.*jinja: is not UTF-8 text"):
        locate("demo", chat_template=file)
    with pytest.raises(ValueError, match=r"--chat-template none: cannot be read: No such file"):
        locate("demo", chat_template=Path("none"))


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


# ---- what its files ask for


HOSTILE = "\x1b]0;owned\x07 \x9b2J\x08 text\r"
CODE = """
from transformers import Qwen3Config, Qwen3ForCausalLM
open({note!r}, "w").close()
class Config(Qwen3Config):
    model_type = "theirs"
class Model(Qwen3ForCausalLM):
    config_class = Config
"""


class Payload:
    """An object whose pickle makes a file when it is loaded."""

    def __init__(self, note: Path) -> None:
        self.note = note

    def __reduce__(self) -> Any:
        return open, (str(self.note), "w")


@pytest.fixture
def folder(model_folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(model_folder, tmp_path / "theirs")


@pytest.fixture
def note(tmp_path: Path) -> Path:
    """The file that code of the model's would make."""
    return tmp_path / "executed"


def change_config(folder: Path, **settings: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))


def brings_code(folder: Path, note: Path) -> None:
    (folder / "code.py").write_text(CODE.format(note=str(note)))
    code = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    change_config(folder, model_type="theirs", auto_map=code)


def pickles_code(folder: Path, note: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Payload(note)}, folder / "pytorch_model.bin")


def asks_for_kernels(folder: Path, note: Path) -> None:
    change_config(folder, attn_implementation="somebody/kernels")


def asks_for_kernels_of_a_part(folder: Path, note: Path) -> None:
    change_config(folder, model_type="gemma3", attn_implementation={"text_config": "somebody/kernels"})


def is_an_adapter_of(base: Path, folder: Path) -> None:
    """Leave the tokenizer, and put an adapter in place of the model."""
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (folder / name).unlink()
    adapter = LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, lora_alpha=256)
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), adapter).save_pretrained(folder)


def asks_for_kernels_of_its_base(folder: Path, note: Path) -> None:
    base = shutil.copytree(folder, folder.with_name("base"))
    is_an_adapter_of(base, folder)
    change_config(base, attn_implementation="somebody/kernels")


def generate(folder: Path, *arguments: str) -> Any:
    """Run `generate` with a yes to whatever is asked."""
    options = ["--model", str(folder), "--mode", "eager", "--max-new-tokens", "2"]
    return CliRunner().invoke(app, ["generate", "Hi", *options, *arguments], input="y\n" * 9)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (brings_code, "brings Python code of its own, which compiled-llm does not run"),
        (pickles_code, "weights are a pickle that is damaged, or asks for more than tensors"),
        (asks_for_kernels, "asks for attention kernels from the hub (somebody/kernels)"),
        (asks_for_kernels_of_its_base, "asks for attention kernels from the hub (somebody/kernels)"),
        (asks_for_kernels_of_a_part, "asks for attention kernels from the hub (somebody/kernels)"),
    ],
)
def test_a_model_that_would_run_code_is_refused(
    folder: Path, note: Path, spoil: Callable[[Path, Path], None], message: str
) -> None:
    spoil(folder, note)
    result = generate(folder)
    assert result.exit_code == 1, result.output
    assert message in " ".join(result.output.split())
    assert "[y/N]" not in result.output
    assert not note.exists()


def test_an_adapter_is_loaded_upon_the_model_that_it_names(model_folder: Path, folder: Path) -> None:
    is_an_adapter_of(model_folder, folder)
    result = generate(folder)
    assert result.exit_code == 0, result.output
    assert result.stdout != generate(model_folder).stdout


def test_a_generate_that_lies_beside_the_weights_is_not_run(folder: Path, note: Path) -> None:
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(f"open({str(note)!r}, 'w').close()")
    assert generate(folder).exit_code == 0
    assert not note.exists()


def test_a_chat_template_runs_in_a_sandbox(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    result = generate(folder, "--chat")
    assert result.exit_code == 2
    assert "the model's chat template refuses this: access to attribute" in result.output


# ---- what reaches the terminal


def test_errors_show_control_characters(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(f"{{{{ raise_exception({HOSTILE!r}) }}}}")
    result = generate(folder, "--chat")
    assert result.exit_code == 2
    assert r"\x1b]0;owned\x07 \x9b2J\x08 text" in result.output
    assert printable(result.output) == result.output


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stdout", "expected"), [(Terminal(), printable(HOSTILE) + "\n"), (io.StringIO(), HOSTILE + "\n")]
)
def test_generated_text_is_shown_on_a_terminal_and_left_alone_elsewhere(
    model_folder: Path, stdout: io.StringIO, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", stdout)
    AnswerStreamer(AutoTokenizer.from_pretrained(model_folder)).on_finalized_text(HOSTILE, stream_end=True)
    assert stdout.getvalue() == expected


def test_text_without_control_characters_stays_as_it_is() -> None:
    for text in ("a\tb\nc", "é 中文 שלום 🙂", "\\x1b"):
        assert printable(text) == text
