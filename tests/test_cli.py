from __future__ import annotations

import re
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from typer.testing import CliRunner

from compiled_llm.commands import app
from conftest import tiny_qwen3

COMMAND = str(Path(sys.executable).with_name("compiled-llm"))
FIGURES = re.compile(
    r"^(\d+) tokens, [\d.]+ tokens/s, first token after [\d.]+ s, "
    r"\d+ graphs, \d+ graph breaks, \d+ recompiles, \d+ cudagraph skips$",
    re.MULTILINE,
)
TEMPLATE = "{% for message in messages %}<{{ message['content'] }}>{% endfor %}"


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 that never stops, with a tokenizer of one token a character."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_qwen3(eos_token_id=None).save_pretrained(folder)
    vocabulary = ["<pad>", "<s>", "</s>", "<unk>", *map(chr, range(32, 127))]
    vocabulary += [f"<{i}>" for i in range(len(vocabulary), 128)]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return folder


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, *arguments], capture_output=True, text=True, timeout=300)


def greedy(folder: Path, prompt: str, max_new_tokens: int) -> tuple[str, str]:
    """The prompt as the tokenizer reads it, and HuggingFace's own continuation."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(prompt, return_tensors="pt")
    tokens = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)[0]
    length = inputs["input_ids"].shape[1]
    return tuple(tokenizer.decode(part, skip_special_tokens=True) for part in (tokens[:length], tokens[length:]))


def test_generate_writes_huggingfaces_text_and_the_figures(model_folder: Path) -> None:
    done = run("generate", "Hello world", "--model", str(model_folder), "--max-new-tokens", "40", "--mode", "eager")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(greedy(model_folder, "Hello world", 40)) + "\n"
    figures = FIGURES.search(done.stderr)
    assert figures is not None, done.stderr
    assert figures[1] == "40"


def test_chat_writes_the_answer_alone(model_folder: Path) -> None:
    arguments = ("--model", str(model_folder), "--max-new-tokens", "10", "--mode", "eager", "--chat")
    done = run("generate", "Hi", *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout == greedy(model_folder, "<Hi>", 10)[1] + "\n"


def test_interrupt_exits_130_without_a_traceback(model_folder: Path) -> None:
    arguments = ("--model", str(model_folder), "--max-new-tokens", "1000", "--mode", "eager")
    with subprocess.Popen(
        [COMMAND, "generate", "Hello world", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(1) == "H"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors


def test_closed_pipe_ends_quietly(model_folder: Path) -> None:
    arguments = ("--model", str(model_folder), "--max-new-tokens", "1000", "--mode", "eager")
    with subprocess.Popen(
        [COMMAND, "generate", "Hello world", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        errors = process.stderr.read()
    assert process.returncode == 1
    assert "Traceback" not in errors
    assert "Exception ignored" not in errors


def test_help_names_the_options() -> None:
    shown = CliRunner().invoke(app, ["generate", "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert shown.exit_code == 0
    for option in ("--model", "--max-new-tokens", "--mode", "--dtype", "--device", "--chat"):
        assert option in shown.output


def test_version() -> None:
    assert run("--version").stdout == f"compiled-llm {version('compiled-llm')}\n"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["generate"], 2, "Missing argument"),
        (["generate", "x", "--max-new-tokens", "0"], 2, "--max-new-tokens"),
        (["generate", "x", "--dtype", "int8"], 2, "--dtype"),
        (["nosuch"], 2, "nosuch"),
        (["generate", "x", "--model", "/no/such/folder"], 2, "error: model='/no/such/folder'"),
        (["generate", "x", "--model", "nosuch.gguf"], 2, "error: model='nosuch.gguf'"),
        (["generate", "x", "--model", __file__], 2, "is a file, but not a .gguf"),
        (["generate", "x", "--model", "nobody/nothing"], 1, "error: nobody/nothing cannot be loaded"),
    ],
)
def test_bad_arguments_give_one_clear_error(arguments: list[str], code: int, message: str) -> None:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert result.exit_code == code
    assert message in result.output
    assert "Traceback" not in result.output


def test_unknown_mode_is_a_usage_error(model_folder: Path) -> None:
    result = CliRunner().invoke(app, ["generate", "x", "--model", str(model_folder), "--mode", "nosuch"])
    assert result.exit_code == 2
    assert "nosuch" in result.output


def test_damaged_files_are_named(tmp_path: Path, model_folder: Path) -> None:
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for file in model_folder.iterdir():
        (damaged / file.name).write_bytes(file.read_bytes())
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    gguf = tmp_path / "damaged.gguf"
    gguf.write_bytes(b"not a model")
    for model in (tmp_path, damaged, gguf):
        result = CliRunner().invoke(app, ["generate", "x", "--model", str(model)])
        assert result.exit_code == 1, result.exception
        assert f"error: {model} cannot be loaded" in result.output


def test_missing_typer_names_the_extra(tmp_path: Path) -> None:
    code = "import sys; sys.modules['typer'] = None; from compiled_llm.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert "pip install 'compiled-llm[demo]'" in done.stderr
