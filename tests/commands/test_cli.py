from __future__ import annotations

import functools
import json
import os
import pty
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import compiled_llm
from compiled_llm.commands import preparation
from compiled_llm.commands.figures import answer_figures
from compiled_llm.commands.generate.run import GenerateRequest
from compiled_llm.commands.options.running import AllRunningOptions
from compiled_llm.commands.options.sampling import SamplingFlags, SamplingOptions
from compiled_llm.commands.preparation import Preparation
from compiled_llm.config import KVScales, WrapConfig
from compiled_llm.execution.reporting.stats import Stats
from support.characters import character_tokenizer
from support.commands.command_line import greedy, invoke
from support.commands.foreign_folder import OURS, STANDARD, ForeignFolder, imported
from support.execution.stand_in_cuda_graphs import let_a_cpu_capture
from support.server.engine_processes import COMMAND
from support.tiny_models import tiny_qwen3

FIGURES = re.compile(
    r"^(\d+) tokens in [\d.]+ s, the first after [\d.]+ s, then [\d.]+ tokens/s\n"
    r"(nothing compiled|\d+ graphs? (compiled|traced) in \d+ s, and .*)$",
    re.MULTILINE,
)


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, *arguments], cwd=cwd, capture_output=True, text=True, timeout=300)


def generate(folder: Path, *arguments: str, stdin: str | bytes | None = None) -> Any:
    """Run `generate` in this process, uncompiled."""
    options = ("--model", str(folder), "--mode", "eager", "--max-new-tokens", "40")
    return invoke("generate", *options, *arguments, stdin=stdin)


def answer(folder: Path, *arguments: str) -> dict[str, Any]:
    """The object that `--json` writes."""
    result = generate(folder, "--json", *arguments)
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()
    return json.loads(line)


def test_generate_writes_huggingfaces_text_and_the_figures(model_folder: Path) -> None:
    done = generate(model_folder, "Hello world")
    assert done.exit_code == 0, done.stderr
    assert_text_and_figures(model_folder, done.stdout, done.stderr)


@pytest.mark.whole
def test_generate_in_a_process_of_its_own(model_folder: Path, foreign: ForeignFolder) -> None:
    arguments = ("Hello world", "--model", str(model_folder), "--max-new-tokens", "40", "--mode", "eager")
    done = run("generate", *arguments, cwd=foreign.path)
    assert done.returncode == 0, done.stderr
    assert foreign.executed() == ""
    assert_text_and_figures(model_folder, done.stdout, done.stderr)


def assert_text_and_figures(model_folder: Path, text: str, said: str) -> None:
    assert text == "".join(greedy(model_folder, "Hello world", 40)) + "\n"
    figures = FIGURES.search(said)
    assert figures is not None, said
    assert figures[1] == "40"


# ---- where the prompt comes from


def test_prompt_comes_from_a_file_a_pipe_or_a_dash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts: list[str] = []
    monkeypatch.setattr(GenerateRequest, "run", lambda request, prompt, *more: prompts.append(prompt))
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"\xef\xbb\xbfHello\nworld\r\n")
    asked: list[tuple[tuple[str, ...], str | None, str]] = [
        (("Hello\nworld",), "what is piped in is not read beside a PROMPT", "Hello\nworld"),
        (("--file", str(file)), "nor beside a file", "Hello\nworld"),
        ((), "Hello\nworld\n", "Hello\nworld"),
        (("-",), "Hello\nworld", "Hello\nworld"),
        (("--file", "-"), "Hello\nworld\n", "Hello\nworld"),
        (("x\n",), None, "x\n"),
        ((), "x\n\n", "x\n"),
    ]
    for arguments, stdin, _ in asked:
        assert generate(tmp_path, *arguments, stdin=stdin).exit_code == 0
    assert prompts == [expected for *_, expected in asked]


def test_prompts_that_cannot_be_read_are_usage_errors(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"abc\xff")
    asked: list[tuple[tuple[str, ...], str | bytes | None, str]] = [
        ((), None, "the prompt is empty"),
        ((), "\n", "the prompt is empty"),
        (("",), "piped", "the prompt is empty"),
        ((), b"\xff", "stdin: is not UTF-8 text"),
        (("x", "--file", str(binary)), None, "PROMPT and --file were both given"),
        (("-", "--file", "-"), "x", "PROMPT and --file were both given"),
        (("--file", str(tmp_path / "none")), None, "none: cannot be read: No such file"),
        (("--file", str(tmp_path)), None, "cannot be read: Is a directory"),
        (("--file", str(binary)), None, "is not UTF-8 text: invalid start byte at byte 3"),
        (("\udcff",), None, "PROMPT: is not UTF-8 text"),
    ]
    for arguments, stdin, message in asked:
        assert_usage_error(generate(Path("/no/such/model"), *arguments, stdin=stdin), message)


def test_terminal_without_a_prompt_is_not_waited_for() -> None:
    ours, terminal = pty.openpty()
    try:
        done = subprocess.run([COMMAND, "generate"], stdin=terminal, capture_output=True, text=True, timeout=60)
    finally:
        os.close(ours)
        os.close(terminal)
    assert done.returncode == 2
    assert done.stderr == "error: there is no prompt: give it as PROMPT, with --file PATH, or pipe it in\n"


def assert_usage_error(result: Any, message: str) -> None:
    """One line on stderr, exit code 2."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line


# ---- chat


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize(("flags", "system"), [([], ""), (["--system", "Be brief"], "<system: Be brief>")])
def test_chat_writes_the_answer_alone_to_system_and_user(model_folder: Path, flags: list[str], system: str) -> None:
    result = generate(model_folder, "Hi", "--chat", *flags)
    assert result.stdout == greedy(model_folder, f"{system}<user: Hi>", 40)[1] + "\n"


def test_a_model_that_is_made_for_chats_is_named_once_if_it_is_not_asked_so(model_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "plain")
    (folder / "chat_template.jinja").unlink()
    for model, flags, count in ((model_folder, [], 1), (model_folder, ["--chat"], 0), (folder, [], 0)):
        result = generate(model, "Hi", *flags)
        assert result.stderr.count("the model is trained for chat: --chat sends it your prompt as a message") == count


def test_another_tokenizer_and_another_template_than_the_models(model_folder: Path, tmp_path: Path) -> None:
    weights, template = tmp_path / "weights", tmp_path / "chat.jinja"
    shutil.copytree(model_folder, weights, ignore=shutil.ignore_patterns("tokenizer*", "*.jinja"))
    template.write_text("Q: {{ messages[0]['content'] }} A:")
    own = ["--tokenizer", str(model_folder), "--chat-template", str(template)]
    assert answer(weights, "hi", "--chat", *own)["text"] == greedy(model_folder, "Q: hi A:", 40)[1]
    larger = character_tokenizer()
    larger.add_tokens([f"<{number}>" for number in range(2000)])
    larger.save_pretrained(tmp_path / "larger")
    done = generate(weights, "hi", "--tokenizer", str(tmp_path / "larger"))
    assert done.exit_code == 2
    assert re.search(r"--tokenizer /.*/larger: its token ids go up to \d+, and the model's to \d+", done.stderr)


def test_a_template_that_refuses_or_is_missing_is_a_usage_error(model_folder: Path, tmp_path: Path) -> None:
    result = generate(model_folder, "Hi", "--chat", "--system", "forbidden")
    assert result.exit_code == 2
    assert "error: --chat: the model's chat template refuses this: no such message" in result.stderr
    folder = shutil.copytree(model_folder, tmp_path / "plain")
    (folder / "chat_template.jinja").unlink()
    result = generate(folder, "Hi", "--chat")
    assert result.exit_code == 2
    assert "has no chat template" in result.stderr


# ---- sampling


@functools.cache
def wrapped(folder: Path) -> Any:
    return compiled_llm.wrap(AutoModelForCausalLM.from_pretrained(folder), mode="eager", progress=False)


def drawn(folder: Path, seed: int = 1, **options: Any) -> list[int]:
    """The tokens after "Hello" that the Python interface draws."""
    inputs = AutoTokenizer.from_pretrained(folder)("Hello", return_tensors="pt")
    torch.manual_seed(seed)
    return wrapped(folder).generate(**inputs, max_new_tokens=40, **{"do_sample": True, **options})[0, 5:].tolist()


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize(
    "options", [{"temperature": 0.4, "top_k": 8, "repetition_penalty": 2.0}, {"top_p": 0.6, "min_p": 0.15}]
)
def test_sampling_flags_draw_as_generate_does(model_folder: Path, options: dict[str, float]) -> None:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    tokens = answer(model_folder, "Hello", *flags, "--seed=2")["token_ids"]
    assert tokens == drawn(model_folder, seed=2, **options)
    assert tokens != drawn(model_folder, seed=1, **options)
    for name in options:
        others = {other: value for other, value in options.items() if other != name}
        assert tokens != drawn(model_folder, seed=2, **others), f"{name} makes a difference"


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize(("flag", "options"), [("--sample", {}), ("--top-k=0", {"top_k": 0})])
def test_without_settings_all_tokens_may_be_drawn(model_folder: Path, flag: str, options: dict[str, Any]) -> None:
    assert answer(model_folder, "Hello", flag, "--seed=1")["token_ids"] == drawn(model_folder, **options)


def test_greedy_takes_a_repetition_penalty(model_folder: Path) -> None:
    penalised = answer(model_folder, "Hello", "--greedy", "--repetition-penalty", "5")["token_ids"]
    assert penalised == drawn(model_folder, do_sample=False, repetition_penalty=5.0)
    assert penalised != drawn(model_folder, do_sample=False)


@pytest.mark.whole
def test_models_own_settings_hold_where_no_flag_is_given(model_folder: Path, tmp_path: Path) -> None:
    folder = with_generation_config(model_folder, tmp_path, top_k=2, do_sample=True)
    assert answer(folder, "Hello", "--seed", "1")["token_ids"] == drawn(model_folder, top_k=2)
    assert answer(folder, "Hello")["token_ids"] == drawn(model_folder, do_sample=False)


def with_generation_config(model_folder: Path, tmp_path: Path, **settings: Any) -> Path:
    folder = shutil.copytree(model_folder, tmp_path / "model")
    file = folder / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
    return folder


# ---- the end, and the output


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("positions", [12, 40])
def test_context_of_a_few_tokens_is_enough(model_folder: Path, tmp_path: Path, positions: int, monkeypatch) -> None:
    """One row is warmed up, and on CUDA captured."""
    folder = shutil.copytree(model_folder, tmp_path / "model")
    tiny_qwen3(eos_token_id=None, max_position_embeddings=positions).save_pretrained(folder)
    expected = greedy(folder, "Hello", positions - 5)[1]
    assert answer(folder, "Hello", "--max-new-tokens", str(positions - 5))["text"] == expected
    let_a_cpu_capture(monkeypatch)
    assert answer(folder, "Hello", "--max-new-tokens", str(positions - 5))["text"] == expected


def test_stop_text_ends_the_answer(model_folder: Path) -> None:
    text = greedy(model_folder, "Hello", 40)[1]
    stop = text[10:12]
    stopped = answer(model_folder, "Hello", "--stop", "never comes", "--stop", stop)
    assert stopped["text"] == text[: text.index(stop) + 2]
    assert stopped["finish_reason"] == "stop_sequence"


def test_finish_reason_is_eos_or_length(model_folder: Path, tmp_path: Path) -> None:
    whole = answer(model_folder, "Hello", "--stop", "never comes")
    assert whole["finish_reason"] == "length"
    eos = whole["token_ids"][7]
    ended = answer(with_generation_config(model_folder, tmp_path, eos_token_id=[3, eos]), "Hello")
    assert ended["finish_reason"] == "eos_token"
    assert ended["token_ids"] == whole["token_ids"][: whole["token_ids"].index(eos) + 1]


def test_json_holds_text_figures_and_stats(model_folder: Path) -> None:
    prompt, text = greedy(model_folder, "Hello world", 40)
    result = generate(model_folder, "Hello world", "--json")
    assert FIGURES.search(result.stderr) is None
    (line,) = result.stdout.splitlines()
    written = json.loads(line)
    assert (written["prompt"], written["text"]) == (prompt, text)
    assert (written["prompt_tokens"], written["tokens"]) == (11, 40)
    assert 0 < written["time_to_first_token"] < written["seconds"]
    assert written["tokens_per_second"] == pytest.approx(39 / (written["seconds"] - written["time_to_first_token"]))
    assert written["stats"]["generate_calls"] == {"fast loop": 1}
    assert written["stats"]["pages"]["used"] == 0


@pytest.mark.whole
def test_keys_and_values_may_take_8_bits(model_folder: Path, tmp_path: Path) -> None:
    given = [answer(model_folder, "Hello world", "--kv-dtype", kv_dtype) for kv_dtype in ("auto", "fp8_e4m3")]
    taken = [one["stats"]["memory"]["pages"] for one in given]
    assert taken[0] == 4 * taken[1], "of float32"
    KVScales([[2.0**-6] * 2] * 2, [[2.0**-6] * 2] * 2).save(tmp_path / "scales.json")
    scaled = answer(model_folder, "Hello", "--kv-dtype", "fp8_e4m3", "--kv-scales", str(tmp_path / "scales.json"))
    assert scaled["stats"]["kv_saturated"] == 0
    result = generate(model_folder, "Hello world", "--kv-dtype", "fp8")
    assert result.exit_code == 2
    assert "fp8_e4m3" in result.output


def test_quiet_shows_the_text_alone(model_folder: Path) -> None:
    done = generate(model_folder, "Hello", "--quiet", "--top-k", "1")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == "".join(greedy(model_folder, "Hello", 40)) + "\n"


def test_help_shows_every_option_in_its_panel() -> None:
    shown = invoke("generate", "--help")
    assert shown.exit_code == 0
    _, *panels = re.split(r"─ (?=Input|Sampling|Model|Output)", shown.output)
    options = [
        "Input --file --chat --system --image",
        "Sampling --sample --temperature --top-k --top-p --min-p --repetition-penalty --seed",
        "Model --model --tokenizer --chat-template --mode --eager-first --backend --dtype --device --kv-dtype "
        "--kv-scales --batch-invariant --artifacts",
        "Output --max-new-tokens --stop --json --quiet",
    ]
    for panel, names in zip(panels, options, strict=True):
        assert re.findall(r"^\w+|(?<=│ )--[\w-]+", panel) == names.split()


@pytest.mark.parametrize("command", [[], ["generate"], ["bench"], ["bench", "latency"]])
def test_h_is_help(command: list[str]) -> None:
    asked = invoke(*command, "-h")
    assert (asked.exit_code, asked.output) == (0, invoke(*command, "--help").output)


def test_help_needs_neither_torch_nor_transformers_nor_matplotlib() -> None:
    commands = ["", "generate", "chat", "explain", "compile", "doctor", "bench", "bench latency"]
    code = """
import sys
from compiled_llm.commands.app import app
from compiled_llm.commands.figures import answer_figures
from compiled_llm.commands.generate.run import GenerateRequest
for command in sys.argv[1:]:
    app([*command.split(), "--help"], standalone_mode=False)
    assert not {"torch", "transformers", "matplotlib"} & set(sys.modules), command
"""
    done = subprocess.run([sys.executable, "-c", code, *commands], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage: ") == len(commands)


def test_a_shell_completes_commands_and_options() -> None:
    for words, expected in (
        ("compiled-llm se", ["serve"]),
        ("compiled-llm serve --tensor-parallel-size 2 --config none --max-mo", ["--max-model-len"]),
    ):
        given = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" ")), "_COMPILED_LLM_COMPLETE": "complete_bash"}
        command = [Path(sys.executable).parent / "compiled-llm"]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **given})
        assert (done.stdout.split(), done.stderr) == (expected, "")


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "compiled_llm", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"compiled-llm {version('compiled-llm')}\n", "")


def test_as_a_module_it_imports_nothing_of_others_from_the_current_folder(tmp_path: Path) -> None:
    """Python itself has looked there for the package, and for what that needs of the standard library."""
    foreign = ForeignFolder(tmp_path / "foreign", imported() - STANDARD - OURS | {"json", "shlex"})
    command = [sys.executable, "-m", "compiled_llm", "generate", "--help"]
    done = subprocess.run(command, cwd=foreign.path, capture_output=True, text=True)
    assert (done.returncode, foreign.executed()) == (0, ""), done.stderr


def test_too_many_tokens_are_refused_before_anything_is_compiled(model_folder: Path) -> None:
    result = generate(model_folder, "x", "--mode", "compile", "--max-new-tokens", "5000")
    assert result.exit_code == 2
    assert "error: --max-new-tokens 5000" in result.stderr
    assert "compiling" not in result.stderr


def test_damaged_files_are_named(tmp_path: Path, model_folder: Path) -> None:
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for file in model_folder.iterdir():
        (damaged / file.name).write_bytes(file.read_bytes())
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    gguf = tmp_path / "damaged.gguf"
    gguf.write_bytes(b"not a model")
    for model in (damaged, gguf):
        result = invoke("generate", "x", "--model", str(model))
        assert result.exit_code == 1, result.exception
        assert f"error: {model} cannot be loaded" in result.output


def test_cheap_checks_come_before_torch_is_imported(tmp_path: Path) -> None:
    said = {
        "--device=cuda": "--device cuda: there is no CUDA driver here",
        "--model=/no/such/folder": "there is no such file or folder",
        "--model=.": "the folder holds no config.json",
        "--model=nobody/nothing": "nobody/nothing cannot be loaded: there is no folder or file of that name",
    }
    code = """
import ctypes, sys
from compiled_llm.commands.app import app
from compiled_llm.commands.figures import answer_figures
from compiled_llm.commands.generate.run import GenerateRequest
def no_driver(name): raise OSError
ctypes.CDLL = no_driver
for option in sys.argv[1:]:
    try:
        app(["generate", "x", option])
    except SystemExit:
        assert "torch" not in sys.modules, option
"""
    done = subprocess.run([sys.executable, "-c", code, *said], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert [message in line for message, line in zip(said.values(), errors, strict=True)] == [True] * len(said)


def test_missing_compiler_is_told_before_weights_are_loaded(model_folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, *_: None)
    result = invoke("generate", "x", "--model", str(model_folder))
    assert (result.exit_code, "loading" in result.stderr) == (1, False)
    assert "error: no C++ compiler was found" in result.stderr
    assert "or use --mode eager" in result.stderr


def test_missing_typer_names_the_extra(tmp_path: Path) -> None:
    code = "import sys; sys.modules['typer'] = None; from compiled_llm.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert "pip install '.[demo]'" in done.stderr


# ---- options and the last line, by themselves


@pytest.mark.parametrize(
    ("compiled", "stats", "said"),
    [
        (2, Stats(graphs=2), "2 graphs compiled in 0 s, and kept for the next start"),
        (0, Stats(graphs=1), "1 graph traced in 0 s, and code taken from the cache"),
        (0, Stats(), "nothing compiled"),
        (
            1,
            Stats(graphs=3, recompiles=1, cudagraph_skips=2),
            "3 graphs compiled in 0 s, and kept for the next start, 1 recompiles, 2 cudagraph skips",
        ),
    ],
)
def test_the_last_line_says_what_was_compiled_and_whether_it_is_kept(
    compiled: int, stats: Stats, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    so_far = iter([7, 7 + compiled])
    monkeypatch.setattr(preparation, "_compiled_so_far", lambda: next(so_far))
    with Preparation() as block:
        pass
    assert block.figures(stats) == said


@pytest.mark.parametrize(
    ("tokens", "seconds", "first", "said"),
    [
        (8, 1.2, 0.5, "8 tokens in 1.20 s, the first after 0.50 s, then 10.0 tokens/s"),
        (1, 0.5, 0.5, "1 token in 0.50 s, the first after 0.50 s"),
        (0, 0.0, None, "0 tokens in 0.00 s"),
    ],
)
def test_the_speed_of_an_answer_is_that_after_its_first_token(tokens: int, seconds: float, first, said: str) -> None:
    assert answer_figures(tokens, seconds, first) == said


def test_on_a_cpu_the_command_and_wrap_share_their_code() -> None:
    """Options may be built into the programs, and so be part of the keys in Inductor's cache."""
    options = AllRunningOptions()
    assert options.wrap_config("cpu") == WrapConfig(eager_first=True)
    assert options.wrap_config("cuda") == WrapConfig(max_batch_size=1, eager_first=True)


@pytest.mark.parametrize("sample", [None, False])
def test_temperature_0_is_greedy(sample: bool | None) -> None:
    """Beside whatever says how to draw, as over HTTP."""
    flags = SamplingFlags(sample, SamplingOptions(temperature=0.0, top_p=0.9, seed=3, repetition_penalty=1.2))
    assert flags.options() == {"do_sample": False, "repetition_penalty": 1.2}
    assert flags.given(8, []) == {"temperature": 0.0, "repetition_penalty": 1.2, "max_tokens": 8}
    assert flags.seed is None


@pytest.mark.parametrize("flag", ["temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed"])
def test_one_option_of_sampling_is_enough_to_draw(flag: str) -> None:
    assert SamplingFlags(None, SamplingOptions(**{flag: 1})).options()["do_sample"]
    assert not SamplingFlags(None, SamplingOptions()).options()["do_sample"]


def test_what_is_not_given_is_left_to_the_model() -> None:
    nothing = SamplingOptions()
    assert SamplingFlags(None, nothing).given(8, []) == {"max_tokens": 8}
    assert SamplingFlags(False, nothing).given(8, []) == {"temperature": 0.0, "max_tokens": 8}
    assert SamplingFlags(True, nothing).given(8, []) == {"temperature": 1.0, "max_tokens": 8}
    assert SamplingFlags(True, SamplingOptions(temperature=0.5, seed=1)).given(8, ["."]) == {
        "temperature": 0.5,
        "seed": 1,
        "max_tokens": 8,
        "stop": ["."],
    }
